// Scatter-gather: each rank owns a chunk of every bucket, and gets the payloads of its chunk from all ranks (all-to-all). It
// takes their mean, encodes that again, and all ranks get it from it (allgather).
//
// A chunk is a stretch of the bucket's elements, segment after segment, that ends where payloads can be cut: nothing is padded.
// What a chunk has of a segment is a piece, which is encoded again by itself.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "codec.h"

namespace hvd_compress {

// A segment of a bucket.
struct Part {
  uint32_t index;
  std::shared_ptr<const Codec> codec;
  size_t n;  // elements
};

// Elements [begin, end) of a segment.
struct Piece {
  uint32_t index;
  size_t begin, end;
};

class Chunks {
 public:
  // Chunks of about as many bytes each. An owner can be left without a piece.
  Chunks(std::vector<Part> parts, size_t owners);

  size_t owners() const { return pieces_.size(); }
  const std::vector<Piece>& pieces(size_t owner) const { return pieces_[owner]; }

  // Bytes that split() writes at most, and the largest message of a chunk that is encoded again.
  size_t split_room() const { return split_room_; }
  size_t message_room(size_t owner) const;

  // Makes of one rank's message of the bucket a message for each owner, one behind the other in out; returns their lengths.
  // A segment that is not in the message is in none of them, one without payload in all without.
  std::vector<size_t> split(const uint8_t* message, size_t bytes, uint8_t* out) const;

 private:
  std::vector<Part> parts_;
  std::vector<std::vector<Piece>> pieces_;
  size_t split_room_ = 0;
};

// A payload, where it lies.
using Bytes = std::pair<const uint8_t*, size_t>;

// out = weight times the sum of what the payloads hold, each of n elements; zeros where there is none.
void decode_sum(const Codec& codec, const std::vector<Bytes>& payloads, float weight, float* out, size_t n);

// Encodes weight times the sum of a piece's payloads (n elements), as Codec::encode does; scratch has room for n floats.
Encoded encode_again(const Codec& codec, const std::vector<Bytes>& payloads, float weight, const float* residual_in,
                     float* residual_out, size_t n, const Step& step, float* scratch, uint8_t* out);

}  // namespace hvd_compress
