#include "scatter.h"

#include <algorithm>

#include "message.h"

namespace hvd_compress {
namespace {

size_t message_bytes(const std::vector<Piece>& pieces, const std::vector<Part>& parts) {
  size_t bytes = kHeaderBytes + 1;
  for (const Piece& piece : pieces) {
    const auto part = std::find_if(parts.begin(), parts.end(), [&](const Part& p) { return p.index == piece.index; });
    bytes += kEntryBytes + part->codec->max_payload(piece.end - piece.begin);
  }
  return bytes;
}

}  // namespace

Chunks::Chunks(std::vector<Part> parts, size_t owners) : parts_(std::move(parts)), pieces_(owners) {
  double total = 0;
  for (const Part& part : parts_) total += static_cast<double>(part.codec->max_payload(part.n));
  double before = 0;
  for (const Part& part : parts_) {
    const double size = static_cast<double>(part.codec->max_payload(part.n));
    const auto bound = [&](size_t owner) {
      const double share = (total * static_cast<double>(owner) / static_cast<double>(owners) - before) / size;
      if (share >= 1) return part.n;
      const auto element = static_cast<size_t>(std::max(share, 0.0) * static_cast<double>(part.n));
      return element / part.codec->grain() * part.codec->grain();
    };
    for (size_t owner = 0, begin = 0; owner < owners; ++owner) {
      const size_t end = owner + 1 == owners ? part.n : bound(owner + 1);
      if (begin < end) pieces_[owner].push_back({part.index, begin, end});
      begin = end;
    }
    before += size;
  }
  for (const auto& pieces : pieces_) split_room_ += message_bytes(pieces, parts_);
}

size_t Chunks::message_room(size_t owner) const { return message_bytes(pieces_[owner], parts_); }

std::vector<size_t> Chunks::split(const uint8_t* message, size_t bytes, uint8_t* out) const {
  const Message whole = read_messages(message, bytes, 1)[0];
  struct Cut {
    const Part* part;
    const Entry* entry;
    size_t cursor = 0;
  };
  std::vector<Cut> cuts;  // in the order of the parts, which is that of the pieces
  for (const Part& part : parts_) {
    const auto entry = std::find_if(whole.entries.begin(), whole.entries.end(),
                                    [&](const Entry& e) { return e.index == part.index; });
    cuts.push_back({&part, entry == whole.entries.end() ? nullptr : &*entry});
  }
  std::vector<size_t> lengths;
  for (const auto& pieces : pieces_) {
    size_t end = kHeaderBytes;
    auto cut = cuts.begin();
    for (const Piece& piece : pieces) {
      while (cut->part->index != piece.index) ++cut;
      if (cut->entry == nullptr) continue;
      size_t size = 0;
      if (cut->entry->bytes > 0) {
        size = cut->part->codec->cut(message + cut->entry->offset, cut->entry->bytes, cut->part->n, piece.begin, piece.end,
                                     cut->cursor, out + end + kEntryBytes);
      }
      write_entry(out + end, piece.index, size);
      end += kEntryBytes + size;
    }
    lengths.push_back(finish_message(out, end, whole));
    out += lengths.back();
  }
  return lengths;
}

void decode_sum(const Codec& codec, const std::vector<Bytes>& payloads, float weight, float* out, size_t n) {
  if (payloads.empty()) std::fill(out, out + n, 0.0f);
  bool add = false;
  for (const auto& [payload, bytes] : payloads) {
    codec.decode(payload, bytes, weight, add, out, n);
    add = true;
  }
}

Encoded encode_again(const Codec& codec, const std::vector<Bytes>& payloads, float weight, const float* residual_in,
                     float* residual_out, size_t n, const Step& step, float* scratch, uint8_t* out) {
  decode_sum(codec, payloads, weight, scratch, n);
  if (payloads.empty()) return codec.encode({scratch, DType::kFloat32}, residual_in, residual_out, n, step, out);
  return codec.encode_mean(payloads[0].first, scratch, residual_in, residual_out, n, step, out);
}

}  // namespace hvd_compress
