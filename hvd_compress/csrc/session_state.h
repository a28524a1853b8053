// The one Session there is, with what Python calls. Every method may be called from any thread.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "meter.h"
#include "session.h"

namespace hvd_compress {

// The figures of one segment, in one round or in all.
struct Counters {
  int64_t rounds = 0;
  int64_t grad_bytes = 0;
  int64_t gathered_bytes = 0;   // payload, and what its message adds, that all ranks got
  int64_t scattered_bytes = 0;  // that went to other ranks in a scatter-gather
  int64_t reduced_bytes = 0;    // that Horovod's own allreduce carried: the gradient, or the stand-in for it
  bool gathered = false, scattered = false, reduced = false;
  int64_t selected = -1;
  double encode_s = 0, wait_s = 0, decode_s = 0;
  double residual_sq = 0;
  int64_t payload_bytes = 0, encoded = 0;  // of so many gradients
  double energy = 0, improved = 0;  // see Encoded; improved: energy times improvement

  void add(const Counters& later);
};

class SessionState final : public Session {
 public:
  explicit SessionState(uint64_t seed) : seed_(seed) {}

  // Numbers of their own count up from 0.
  int64_t add_segment(std::shared_ptr<const Codec> codec, bool has_residual);
  int64_t add_group(const std::vector<int64_t>& segments, uint64_t digest);

  // A bucket of a group that is scattered: its members, each with its number of elements.
  void add_scattered_bucket(int64_t group, int64_t bucket, const std::vector<std::pair<int64_t, size_t>>& members);

  void set_codec(int64_t segment, std::shared_ptr<const Codec> codec, bool has_residual);
  void set_digest(int64_t group, uint64_t digest);
  void set_seed(uint64_t seed);
  uint64_t seed();

  // Every later `arrive` throws this.
  void fail(const std::string& text);
  void on_warning(std::function<void(const std::string&)> call);

  struct Stats {
    int64_t rounds = 0;
    std::vector<Counters> last, total;     // by segment
    std::vector<int64_t> segments_of_last;  // which ones the last round had
  };
  Stats stats();

  // Codecs ask what sending costs on that network: it is measured from now on.
  void measure(const std::string& network);
  Meter meter();

  Task arrive(int64_t group, int64_t member, const std::string& variable) override;
  Task task(int64_t group, int64_t member) override;
  void encoded(int64_t group, int64_t member, const Encoded& encoded, bool scattered, size_t grad_bytes, double seconds,
               std::function<void()> undo) override;
  std::shared_ptr<Scope> scope(int64_t group, int64_t bucket, const Codec& codec) override;
  void defer(int64_t group, int64_t bucket, Deferred deferred) override;
  std::map<int64_t, Deferred> take_deferred(int64_t group, int64_t bucket) override;
  void encoded_now(int64_t group, int64_t member, const Encoded& encoded, bool scattered, double seconds) override;
  void encoded_again(int64_t group, int64_t member, double seconds, std::function<void()> undo) override;
  void scattered(int64_t group, int64_t member, size_t bytes) override;
  void sent(int64_t group, int64_t bucket, int64_t member, bool scattered) override;
  float seconds(int64_t group, int64_t bucket) override;
  std::vector<Message> received(int64_t group, int64_t bucket, const uint8_t* data, size_t bytes) override;
  void finished(int64_t group, int64_t member, bool finite, double seconds) override;
  void reduced(int64_t group, int64_t member, size_t grad_bytes, size_t reduced_bytes) override;
  std::shared_ptr<const Chunks> chunks(int64_t group, int64_t bucket, size_t ranks) override;
  std::shared_ptr<const Codec> codec(int64_t group, int64_t member) override;
  std::shared_ptr<void>& attachment(int64_t segment) override;
  void warn(const std::string& text) override;

 private:
  using Clock = std::chrono::steady_clock;

  struct Segment {
    std::shared_ptr<const Codec> codec;
    bool has_residual = false;
    std::shared_ptr<void> attachment;
    std::string variable;
    Counters last, total;
  };

  struct Member {
    int64_t segment = 0;
    bool arrived = false, finished = false;
    std::function<void()> undo, undo_piece;
    Counters now;
  };

  struct ScatteredBucket {
    std::vector<std::pair<int64_t, size_t>> members;
    size_t ranks = 0;
    std::shared_ptr<const Chunks> chunks;  // among so many ranks, where they were asked for
  };

  // A message under way.
  struct Flight {
    Clock::time_point begun, sent;  // the first time, and the last: in a scatter-gather two are sent
    bool alone = true;              // no other was under way when it began
    bool scattered = false;
    int phases = 0;                 // that have begun
    bool done = false;
  };

  struct Group {
    std::vector<Member> members;
    uint64_t digest = 0;
    size_t finished = 0;
    bool open = false, nonfinite = false;
    std::map<int64_t, Flight> flights;   // by bucket, in this round
    std::map<int64_t, float> seconds;    // by bucket: what the last one took, 0 where others were under way
    std::map<int64_t, ScatteredBucket> scattered;
    std::map<std::pair<int64_t, const Codec*>, std::shared_ptr<Scope>> scopes;  // by bucket and codec
    std::map<int64_t, std::map<int64_t, Deferred>> deferred;                    // by bucket and member
  };

  static void count(const Encoded& encoded, bool scattered, Counters& counters);
  Task task_of(const Group& group, const Member& member);
  void take_back(Member& member);
  void note_nonfinite(Group& group);
  bool is_idle() const;
  void note_times(Group& group, int64_t number, int64_t bucket, const std::vector<Message>& messages, size_t bytes);
  void close(Group& group);

  std::mutex mutex_;
  uint64_t seed_;
  std::deque<Segment> segments_;  // a deque: references stay good while others are added
  std::deque<Group> groups_;
  int64_t rounds_ = 0;
  bool measures_ = false;
  Meter meter_;
  std::vector<int64_t> segments_of_last_;
  std::string failure_;
  std::mutex warning_mutex_;
  std::set<std::string> warned_;
  std::function<void(const std::string&)> warning_;
};

// Sessions live as long as the process: a framework's graph may call one at any time.
int64_t make_session(uint64_t seed);
SessionState* find_session(int64_t number);

}  // namespace hvd_compress
