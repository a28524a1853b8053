#include "message.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace hvd_compress {
namespace {

constexpr char kMagic[4] = {'H', 'V', 'D', 'C'};

template <class T>
T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <class T>
void store(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

// An index that is there more than once, or -1.
int64_t found_twice(const std::vector<Entry>& entries) {
  std::vector<int64_t> indices(entries.size());
  std::transform(entries.begin(), entries.end(), indices.begin(), [](const Entry& entry) { return entry.index; });
  std::sort(indices.begin(), indices.end());
  const auto found = std::adjacent_find(indices.begin(), indices.end());
  return found == indices.end() ? -1 : *found;
}

Message read_message(const uint8_t* data, size_t start, size_t end, const std::string& rank) {
  Message message;
  message.flags = load<uint32_t>(data + start + 4);
  message.digest = load<uint64_t>(data + start + 8);
  message.step = load<uint64_t>(data + start + 16);
  message.seconds = load<float>(data + start + 24);
  size_t at = start + kHeaderBytes;
  while (end - at > 1) {
    if (end - at < kEntryBytes) throw MalformedPayload("rank " + rank + "'s message ends in the middle of a segment");
    const auto index = load<uint32_t>(data + at);
    const auto size = load<uint64_t>(data + at + 4);
    at += kEntryBytes;
    if (size > end - at) {
      throw MalformedPayload("rank " + rank + "'s message has segment " + std::to_string(index) + " cut short");
    }
    message.entries.push_back({index, at, static_cast<size_t>(size)});
    at += size;
  }
  if (const int64_t index = found_twice(message.entries); index >= 0) {
    throw MalformedPayload("rank " + rank + "'s message has segment " + std::to_string(index) + " twice");
  }
  return message;
}

}  // namespace

void write_entry(uint8_t* at, uint32_t index, uint64_t payload_bytes) {
  store(at, index);
  store(at + 4, payload_bytes);
}

size_t finish_message(uint8_t* message, size_t end, const Head& head) {
  const size_t length = end + head.step % 2;
  if (length > end) message[end] = 0;
  std::memcpy(message, kMagic, sizeof kMagic);
  store(message + 4, head.flags);
  store(message + 8, head.digest);
  store(message + 16, head.step);
  store(message + 24, head.seconds);
  store(message + 28, static_cast<uint64_t>(length));
  return length;
}

std::vector<Message> read_messages(const uint8_t* data, size_t bytes, int ranks) {
  std::vector<Message> messages;
  size_t start = 0;
  for (int rank = 0; ranks < 0 ? start < bytes : rank < ranks; ++rank) {
    const std::string name = std::to_string(rank);
    if (bytes - start < kHeaderBytes) {
      throw MalformedPayload(std::to_string(bytes) + " bytes end in the header of rank " + name + "'s message");
    }
    const auto length = load<uint64_t>(data + start + 28);
    if (std::memcmp(data + start, kMagic, sizeof kMagic) != 0 || load<uint32_t>(data + start + 4) > kAllFlags ||
        length < kHeaderBytes || length > bytes - start) {
      throw MalformedPayload("rank " + name + "'s message has a header that is none");
    }
    messages.push_back(read_message(data, start, start + length, name));
    start += length;
  }
  if (start != bytes) throw MalformedPayload(std::to_string(bytes - start) + " bytes follow the last rank's message");
  return messages;
}

}  // namespace hvd_compress
