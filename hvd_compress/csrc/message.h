// What travels: one rank's bytes of one bucket, a header, then the payloads with their segments' indices.
//
// Layout, little-endian: "HVDC", uint32 flags, uint64 digest of the plan, uint64 step, float32 seconds that the last exchange
// under this name took, uint64 length in bytes, padding included; then for each segment uint32 index, uint64 payload bytes, payload; then at most one byte of padding. The segments
// stand in the order in which their gradients came, which differs between ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec.h"

namespace hvd_compress {

constexpr uint32_t kNonFinite = 1;  // a gradient held Inf or NaN: every rank undoes the step's residuals
constexpr uint32_t kRepeat = 2;     // no new gradient since the last step's result was handed out: no payloads
constexpr uint32_t kDamaged = 4;    // what the sender was to encode again was damaged: no payloads
constexpr uint32_t kAllFlags = kNonFinite | kRepeat | kDamaged;

constexpr size_t kHeaderBytes = 36;
constexpr size_t kEntryBytes = 12;  // what a segment takes besides its payload

struct Entry {
  uint32_t index;
  size_t offset, bytes;  // of the payload, from the beginning of all messages
};

struct Head {
  uint32_t flags = 0;
  uint64_t digest = 0, step = 0;
  float seconds = 0;  // see meter.h
};

struct Message : Head {
  std::vector<Entry> entries;
};

void write_entry(uint8_t* at, uint32_t index, uint64_t payload_bytes);

// Writes the header of a message whose last entry ends at `end`, and the padding, for which there must be room; returns the
// length. The length of every second step's message is padded by a byte, so that it is never that of the step before: Horovod
// then does not answer it from its response cache, which dies where another rank has called join().
size_t finish_message(uint8_t* message, size_t end, const Head& head);

// The messages of all ranks, which stand one behind the other; ranks < 0: of as many as there are. Throws MalformedPayload
// where they are not what was written.
std::vector<Message> read_messages(const uint8_t* data, size_t bytes, int ranks);

}  // namespace hvd_compress
