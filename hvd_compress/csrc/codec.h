// The interface of every codec: six functions over raw memory.
//
//   create(kind, options)   a codec from an enum and a few numbers, already validated by the caller
//   max_payload(n)          upper bound of the payload of n elements, in bytes
//   encode(...)             one segment -> payload, and the residual that is left
//   decode(...)             out = weight * decoded, or out += weight * decoded
//   cut(...)                a payload -> the payload of some of its elements
//   scope()                 what encodes several segments together, for codecs that choose how much to send of all of them
//
// Nothing here knows a framework. A CUDA codec will be a second implementation of the same six, with a stream.
//
// Every payload begins with a 32-bit checksum of the rest, so that a damaged one is refused before anything is written.
// All numbers on the wire are little-endian.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

namespace hvd_compress {

enum class Kind { kNone, kFp16, kBf16, kAdaComp, kQsgd, kQsgdInf, kNuqsgd, kOneBit, kTopK, kRandomK, kCat };
enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64 };
enum class Coding { kFixed, kElias };
enum class Scale { kL1, kL2 };

enum class Scheme { kTopK, kTopKSign, kStochastic };
enum class CostKind { kMeasured, kBits, kPackets, kTime };

// What differs from one encoding to the next.
struct Step {
  uint64_t seed = 0;          // makes the randomness: the same seed, the same bytes
  double latency = 1e-3, seconds_per_byte = 8e-9;  // of an exchange, as measured
  double explore = 0;         // over 0: nothing is chosen, but this part sent, so that times of several sizes can be measured

  // Of a codec that keeps no residual, and makes what it sends larger for what it does not.
  double explore_unbiased() const { return std::sqrt(std::sqrt(explore)); }
};

// What sending a payload costs, for codecs that choose how much to send: see `Cost::of`. The Python dataclass documents it.
struct CostModel {
  CostKind kind = CostKind::kMeasured;
  double c0 = 0, c1 = 1, packet_bytes = 1500;      // packets: c0 + c1 for each
  double latency = 0, seconds_per_byte = 0;        // time; measured: see Step

  // With what was measured, where that is asked for.
  CostModel measured(const Step& step) const {
    CostModel model = *this;
    if (kind == CostKind::kMeasured) {
      model.latency = step.latency;
      model.seconds_per_byte = step.seconds_per_byte;
    }
    return model;
  }

  double of(double bytes) const {
    switch (kind) {
      case CostKind::kBits: return 8 * bytes;
      case CostKind::kPackets: return c0 + c1 * std::ceil(bytes / packet_bytes);
      default: return latency + bytes * seconds_per_byte;
    }
  }
};

// What a codec is made of. Each kind reads its own few; the Python dataclasses document and validate them.
struct Options {
  int64_t bin = 0;           // AdaComp: elements a bin (L_T); randomk: elements of which one is sent
  float c = 2.0f;            // AdaComp: soft threshold factor
  int bits = 0;              // quantizers: bits a code, the sign included; 0: chosen at every step
  int64_t bucket = 0;        // quantizers: elements that share a norm
  Coding coding = Coding::kFixed;
  bool feedback = false;     // randomk: not unbiased, quantizers: contract by 1 / (1 + variance bound), for error feedback
  Scale scale = Scale::kL1;  // onebit: what a sign stands for
  Scheme scheme = Scheme::kTopK;  // sparsifiers: what is sent of the elements that are selected
  double fraction = 0;       // topk, randomk: of the elements; 0: chosen at every step (cat)
  bool joint = false;        // cat: for all segments of a scope
  CostModel cost;            // of what is chosen at every step
};

struct Encoded {
  size_t bytes = 0;          // length of the payload
  int64_t selected = -1;     // elements sent; -1 where the codec does not choose
  double residual_sq = 0;    // squared L2 norm of the residual that was written; 0 without one
  bool finite = true;        // false: the gradient (or its sum with the residual) held Inf or NaN; the payload decodes to
                             // NaN, and what was written to residual_out is to be thrown away
  double energy = 0;         // where the codec chooses how much to send: the squared L2 norm of what was to be sent,
  double improvement = 0;    // and the part of it by which the choice is expected to improve a step
};

// What is to be encoded: numbers of dtype, contiguous; under a momentum (as many floats), their weighted sum with it.
struct Gradient {
  const void* data;
  DType dtype;
  const float* momentum = nullptr;
  float weight = 1, momentum_weight = 0;
};

// A payload that no encoder wrote.
struct MalformedPayload : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Segments that are encoded together: add() each, choose(), then encode() each, in the order of their indices. What was added
// stays where it is until then.
class Scope {
 public:
  virtual ~Scope() = default;

  // As Codec::encode, but that residual_out receives what is to be sent; returns whether that is finite. May be called from
  // several threads at once.
  virtual bool add(uint32_t index, const Gradient& grad, const float* residual_in, float* residual_out, size_t n) = 0;

  virtual void choose(const Step& step) = 0;

  // Writes the payload of a segment, and to its residual_out what was lost.
  virtual Encoded encode(uint32_t index, uint64_t seed, uint8_t* out) = 0;
};

class Codec {
 public:
  virtual ~Codec() = default;

  virtual size_t max_payload(size_t n) const = 0;

  // Encodes grad (n elements) plus residual_in (n floats, or null) into out (max_payload(n) bytes) and writes what was lost
  // to residual_out (n floats; null exactly where residual_in is; no overlap with it, so that a step can be undone).
  virtual Encoded encode(const Gradient& grad, const float* residual_in, float* residual_out, size_t n, const Step& step,
                         uint8_t* out) const = 0;

  // As encode, of the mean of several payloads, one of which is `like`.
  virtual Encoded encode_mean(const uint8_t* like, const float* mean, const float* residual_in, float* residual_out, size_t n,
                              const Step& step, uint8_t* out) const {
    (void)like;
    return encode({mean, DType::kFloat32}, residual_in, residual_out, n, step, out);
  }

  // Whether all ranks must have the same seed.
  virtual bool shares_seed() const { return false; }

  // A new scope; null where each segment is encoded by itself.
  virtual std::unique_ptr<Scope> scope() const { return nullptr; }

  // out[i] = weight * decoded[i] for n floats, or out[i] += where it is to be added. Throws MalformedPayload, and touches
  // nothing outside of payload[0..bytes) and out[0..n), whatever the payload holds.
  virtual void decode(const uint8_t* payload, size_t bytes, float weight, bool add, float* out, size_t n) const = 0;

  // A payload can be cut between elements that are a multiple of this apart.
  virtual size_t grain() const = 0;

  // Writes the payload of elements [begin, end) of a payload of n: they decode to what they decode to in the whole. begin and
  // end are multiples of grain(), or n; out has room for max_payload(end - begin). `cursor` is 0 for begin = 0, and for a
  // later piece what the call for the piece before has made of it. Returns the bytes.
  virtual size_t cut(const uint8_t* payload, size_t bytes, size_t n, size_t begin, size_t end, size_t& cursor,
                     uint8_t* out) const = 0;
};

std::unique_ptr<Codec> create(Kind kind, const Options& options);

// The checksum that begins every payload: any change within one aligned 32-bit word is always found.
uint32_t checksum(const uint8_t* data, size_t bytes);

// For codecs: writes the checksum of the bytes behind it, and checks it.
constexpr size_t kChecksumBytes = 4;
void seal(uint8_t* payload, size_t bytes);
void check_seal(const uint8_t* payload, size_t bytes);
void check_head(size_t bytes, size_t head);                  // that a payload has at least its head
void check_length(size_t bytes, size_t expected, size_t n);  // of the payload of n elements, where it is always the same

std::unique_ptr<Codec> create_adacomp(const Options& options);
std::unique_ptr<Codec> create_quantizer(Kind kind, const Options& options);
std::unique_ptr<Codec> create_cast(Kind kind);
std::unique_ptr<Codec> create_onebit(const Options& options);
std::unique_ptr<Codec> create_sparsifier(const Options& options);
std::unique_ptr<Codec> create_randomk(const Options& options);

}  // namespace hvd_compress
