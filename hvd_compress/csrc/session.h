// What one compression keeps while a framework's graph calls it from the framework's own threads: which codec each segment
// has, which step is under way, what must be undone, and what was sent.
//
// A group is the gradients that are reduced together, its members; a round is one step of a group, from the first member that
// arrives to the last that is finished. Undoing is the round's: where any rank's message, or a result, is not finite, every
// member of the round is taken back, those that were finished already included.
//
// The framework's ops are another library than the kernels, so they see this interface alone.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "codec.h"
#include "message.h"
#include "scatter.h"

namespace hvd_compress {

// Changes whenever this file or one that it includes does: both libraries must have been built of the same.
constexpr int64_t kSessionVersion = 9;

// What an op needs to encode a member.
struct Task {
  std::shared_ptr<const Codec> codec;
  bool has_residual;
  uint64_t seed;     // of the compression; the rest is mixed in by whoever knows it
  int64_t segment;   // its number in the compression
  uint64_t digest;   // of the group's plan
  Step measured;     // what sending costs; its seed is still to be made
};

// A member whose payload is made when all of its scope have come.
struct Deferred {
  int64_t member;
  std::shared_ptr<Scope> scope;
  size_t room;                                  // that its payload takes at most
  std::function<Encoded(uint8_t* out)> encode;  // after scope->choose()
};

class Session {
 public:
  virtual ~Session() = default;

  // A member's gradient is there. `variable` names what it is the gradient of, so that a second model is noticed; it may be
  // empty. A member that has come in this round already begins the next one.
  virtual Task arrive(int64_t group, int64_t member, const std::string& variable) = 0;

  // What is needed to encode a member again.
  virtual Task task(int64_t group, int64_t member) = 0;

  // It was encoded, to be scattered or gathered: `undo` takes the change of its residual back.
  virtual void encoded(int64_t group, int64_t member, const Encoded& encoded, bool scattered, size_t grad_bytes, double seconds,
                       std::function<void()> undo) = 0;

  // The scope of those of a bucket's members in this round that have this codec.
  virtual std::shared_ptr<Scope> scope(int64_t group, int64_t bucket, const Codec& codec) = 0;

  // `encoded` was called for a member of which there is no payload yet.
  virtual void defer(int64_t group, int64_t bucket, Deferred deferred) = 0;

  // Takes those of a bucket, by their numbers.
  virtual std::map<int64_t, Deferred> take_deferred(int64_t group, int64_t bucket) = 0;

  // One of them is encoded now.
  virtual void encoded_now(int64_t group, int64_t member, const Encoded& encoded, bool scattered, double seconds) = 0;

  // The mean of the own piece of it was encoded again.
  virtual void encoded_again(int64_t group, int64_t member, double seconds, std::function<void()> undo) = 0;

  // So many bytes of it go to other ranks, in a scatter-gather.
  virtual void scattered(int64_t group, int64_t member, size_t bytes) = 0;

  // A message of a bucket, whose first member that is, is handed over to Horovod.
  virtual void sent(int64_t group, int64_t bucket, int64_t member, bool scattered) = 0;

  // How long the last exchange of a bucket took; 0: not known.
  virtual float seconds(int64_t group, int64_t bucket) = 0;

  // The messages of all ranks are there: parsed, and checked for being of the same plan and step. Throws MalformedPayload where
  // they are damaged, or a rank says that what it got was.
  virtual std::vector<Message> received(int64_t group, int64_t bucket, const uint8_t* data, size_t bytes) = 0;

  // A member's result is there.
  virtual void finished(int64_t group, int64_t member, bool finite, double seconds) = 0;

  // As `encoded`, for one that Horovod's own allreduce carries: so many bytes of it.
  virtual void reduced(int64_t group, int64_t member, size_t grad_bytes, size_t reduced_bytes) = 0;

  // The chunks of a bucket that is scattered among so many ranks.
  virtual std::shared_ptr<const Chunks> chunks(int64_t group, int64_t bucket, size_t ranks) = 0;

  // What decodes a member.
  virtual std::shared_ptr<const Codec> codec(int64_t group, int64_t member) = 0;

  // Room for what the framework wants to keep with a segment.
  virtual std::shared_ptr<void>& attachment(int64_t segment) = 0;

  // Says something to the user, once.
  virtual void warn(const std::string& text) = 0;
};

// The session with that number, or null.
using FindSession = Session* (*)(int64_t);

}  // namespace hvd_compress
