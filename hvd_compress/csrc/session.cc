#include "session_state.h"

#include "stand_in.h"

namespace hvd_compress {

void Counters::add(const Counters& later) {
  rounds += later.rounds;
  grad_bytes += later.grad_bytes;
  gathered_bytes += later.gathered_bytes;
  scattered_bytes += later.scattered_bytes;
  reduced_bytes += later.reduced_bytes;
  gathered |= later.gathered;
  scattered |= later.scattered;
  reduced |= later.reduced;
  if (later.selected >= 0) selected = later.selected + (selected > 0 ? selected : 0);
  encode_s += later.encode_s;
  wait_s += later.wait_s;
  decode_s += later.decode_s;
  residual_sq = later.residual_sq;
  payload_bytes += later.payload_bytes;
  encoded += later.encoded;
  energy += later.energy;
  improved += later.improved;
}

int64_t SessionState::add_segment(std::shared_ptr<const Codec> codec, bool has_residual) {
  const std::lock_guard lock(mutex_);
  Segment segment;
  segment.codec = std::move(codec);
  segment.has_residual = has_residual;
  segments_.push_back(std::move(segment));
  return static_cast<int64_t>(segments_.size()) - 1;
}

int64_t SessionState::add_group(const std::vector<int64_t>& segments, uint64_t digest) {
  const std::lock_guard lock(mutex_);
  Group group;
  group.digest = digest;
  for (const int64_t segment : segments) {
    segments_.at(segment);
    group.members.emplace_back();
    group.members.back().segment = segment;
  }
  groups_.push_back(std::move(group));
  return static_cast<int64_t>(groups_.size()) - 1;
}

void SessionState::set_codec(int64_t segment, std::shared_ptr<const Codec> codec, bool has_residual) {
  const std::lock_guard lock(mutex_);
  segments_.at(segment).codec = std::move(codec);
  segments_.at(segment).has_residual = has_residual;
  for (Group& group : groups_) {
    for (auto& [_, bucket] : group.scattered) bucket.chunks = nullptr;  // codecs say where payloads can be cut
  }
}

void SessionState::add_scattered_bucket(int64_t group, int64_t bucket,
                                        const std::vector<std::pair<int64_t, size_t>>& members) {
  const std::lock_guard lock(mutex_);
  groups_.at(group).scattered[bucket].members = members;
}

std::shared_ptr<const Chunks> SessionState::chunks(int64_t group, int64_t bucket, size_t ranks) {
  const std::lock_guard lock(mutex_);
  Group& g = groups_.at(group);
  ScatteredBucket& b = g.scattered.at(bucket);
  if (b.chunks == nullptr || b.ranks != ranks) {
    std::vector<Part> parts;
    for (const auto& [member, n] : b.members) {
      parts.push_back({static_cast<uint32_t>(member), segments_.at(g.members.at(member).segment).codec, n});
    }
    b.chunks = std::make_shared<const Chunks>(std::move(parts), ranks);
    b.ranks = ranks;
  }
  return b.chunks;
}

void SessionState::set_digest(int64_t group, uint64_t digest) {
  const std::lock_guard lock(mutex_);
  groups_.at(group).digest = digest;
}

void SessionState::set_seed(uint64_t seed) {
  const std::lock_guard lock(mutex_);
  seed_ = seed;
}

uint64_t SessionState::seed() {
  const std::lock_guard lock(mutex_);
  return seed_;
}

void SessionState::fail(const std::string& text) {
  const std::lock_guard lock(mutex_);
  failure_ = text;
}

void SessionState::on_warning(std::function<void(const std::string&)> call) {
  const std::lock_guard lock(warning_mutex_);
  warning_ = std::move(call);
}

SessionState::Stats SessionState::stats() {
  const std::lock_guard lock(mutex_);
  Stats stats{rounds_, {}, {}, segments_of_last_};
  for (const Segment& segment : segments_) {
    stats.last.push_back(segment.last);
    stats.total.push_back(segment.total);
  }
  return stats;
}

Task SessionState::arrive(int64_t group, int64_t member, const std::string& variable) {
  Task task;
  bool shared = false;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw std::runtime_error(failure_);
    Group& g = groups_.at(group);
    Member& m = g.members.at(member);
    if (m.arrived) close(g);  // a round that was not finished: an error, or a result that nobody asked for
    g.open = true;
    m.arrived = true;
    Segment& segment = segments_.at(m.segment);
    shared = !variable.empty() && !segment.variable.empty() && variable != segment.variable;
    if (!variable.empty()) segment.variable = variable;
    task = task_of(g, m);
  }
  if (shared) {
    warn("one compression is used for two models, or for a model that was made anew: they have the same residuals then. "
         "Make one compression for each optimizer.");
  }
  return task;
}

Task SessionState::task_of(const Group& group, const Member& member) {
  const Segment& segment = segments_.at(member.segment);
  return {segment.codec, segment.has_residual, seed_, member.segment, group.digest, measures_ ? meter_.step() : Step()};
}

Task SessionState::task(int64_t group, int64_t member) {
  const std::lock_guard lock(mutex_);
  const Group& g = groups_.at(group);
  return task_of(g, g.members.at(member));
}

void SessionState::encoded(int64_t group, int64_t member, const Encoded& encoded, bool scattered, size_t grad_bytes,
                           double seconds, std::function<void()> undo) {
  const std::lock_guard lock(mutex_);
  Member& m = groups_.at(group).members.at(member);
  m.undo = std::move(undo);
  m.now.grad_bytes = static_cast<int64_t>(grad_bytes);
  m.now.reduced_bytes = kStandIn * sizeof(float);
  m.now.scattered = scattered;
  m.now.gathered = !scattered;
  if (!scattered) m.now.gathered_bytes += kEntryBytes;
  m.now.encode_s += seconds;
  count(encoded, scattered, m.now);
}

void SessionState::count(const Encoded& encoded, bool scattered, Counters& counters) {
  if (!scattered) counters.gathered_bytes += static_cast<int64_t>(encoded.bytes);
  counters.payload_bytes += static_cast<int64_t>(encoded.bytes);
  if (encoded.bytes > 0) counters.encoded = 1;
  counters.selected = encoded.selected;
  counters.residual_sq = encoded.residual_sq;
  counters.energy = encoded.energy;
  counters.improved = encoded.energy * encoded.improvement;
}

std::shared_ptr<Scope> SessionState::scope(int64_t group, int64_t bucket, const Codec& codec) {
  const std::lock_guard lock(mutex_);
  auto& scope = groups_.at(group).scopes[{bucket, &codec}];
  if (scope == nullptr) scope = codec.scope();
  return scope;
}

void SessionState::defer(int64_t group, int64_t bucket, Deferred deferred) {
  const std::lock_guard lock(mutex_);
  const int64_t member = deferred.member;
  groups_.at(group).deferred[bucket][member] = std::move(deferred);
}

std::map<int64_t, Deferred> SessionState::take_deferred(int64_t group, int64_t bucket) {
  const std::lock_guard lock(mutex_);
  Group& g = groups_.at(group);
  std::map<int64_t, Deferred> taken = std::move(g.deferred[bucket]);
  g.deferred.erase(bucket);
  for (auto at = g.scopes.begin(); at != g.scopes.end();) at = at->first.first == bucket ? g.scopes.erase(at) : std::next(at);
  return taken;
}

void SessionState::encoded_now(int64_t group, int64_t member, const Encoded& encoded, bool scattered, double seconds) {
  const std::lock_guard lock(mutex_);
  Member& m = groups_.at(group).members.at(member);
  m.now.encode_s += seconds;
  count(encoded, scattered, m.now);
}

void SessionState::encoded_again(int64_t group, int64_t member, double seconds, std::function<void()> undo) {
  const std::lock_guard lock(mutex_);
  Member& m = groups_.at(group).members.at(member);
  m.undo_piece = std::move(undo);
  m.now.encode_s += seconds;
}

void SessionState::scattered(int64_t group, int64_t member, size_t bytes) {
  const std::lock_guard lock(mutex_);
  groups_.at(group).members.at(member).now.scattered_bytes += static_cast<int64_t>(bytes);
}

void SessionState::reduced(int64_t group, int64_t member, size_t grad_bytes, size_t reduced_bytes) {
  const std::lock_guard lock(mutex_);
  Member& m = groups_.at(group).members.at(member);
  m.now.grad_bytes = static_cast<int64_t>(grad_bytes);
  m.now.reduced_bytes = static_cast<int64_t>(reduced_bytes);
  m.now.reduced = true;
}

void SessionState::sent(int64_t group, int64_t bucket, int64_t member, bool scattered) {
  const std::lock_guard lock(mutex_);
  Group& g = groups_.at(group);
  const bool alone = is_idle();
  Flight& flight = g.flights[bucket];
  flight.sent = Clock::now();
  if (flight.phases++ == 0) {
    flight.begun = flight.sent;
    flight.alone = alone;
    flight.scattered = scattered;
  }
  if (!scattered) g.members.at(member).now.gathered_bytes += kHeaderBytes;
}

bool SessionState::is_idle() const {
  for (const Group& group : groups_) {
    for (const auto& [_, flight] : group.flights) {
      if (!flight.done) return false;
    }
  }
  return true;
}

float SessionState::seconds(int64_t group, int64_t bucket) {
  const std::lock_guard lock(mutex_);
  return groups_.at(group).seconds[bucket];
}

void SessionState::measure(const std::string& network) {
  const std::lock_guard lock(mutex_);
  if (!measures_) meter_ = Meter(network);
  measures_ = true;
}

Meter SessionState::meter() {
  const std::lock_guard lock(mutex_);
  return meter_;
}

// The first messages of an exchange tell what the last one took, the last messages end this one.
void SessionState::note_times(Group& group, int64_t number, int64_t bucket, const std::vector<Message>& messages, size_t bytes) {
  const int64_t exchange = number << 32 | bucket;
  Flight& flight = group.flights[bucket];
  if (flight.phases == 1) {
    std::vector<float> seconds;
    for (const Message& message : messages) seconds.push_back(message.seconds);
    meter_.said(exchange, seconds);
  }
  if (flight.phases == (flight.scattered ? 2 : 1)) {
    flight.done = true;
    group.seconds[bucket] = flight.alone ? std::chrono::duration<float>(Clock::now() - flight.begun).count() : 0;
    // What all ranks have encoded again is about as large as what one of them has encoded.
    meter_.sent(exchange, static_cast<double>(bytes) / (flight.scattered ? 1 : static_cast<double>(messages.size())));
  }
}

std::vector<Message> SessionState::received(int64_t group, int64_t bucket, const uint8_t* data, size_t bytes) {
  std::vector<Message> messages = read_messages(data, bytes, -1);
  const std::lock_guard lock(mutex_);
  Group& g = groups_.at(group);
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const Message& message = messages[rank];
    if (message.digest != g.digest) {
      throw std::runtime_error("the ranks do not compress alike: rank " + std::to_string(rank) +
                               " has another plan than this one. Was set_codec() called on every rank?");
    }
    if (message.step != messages[0].step) {
      throw std::runtime_error("rank " + std::to_string(rank) + " is at step " + std::to_string(message.step) +
                               ", rank 0 at step " + std::to_string(messages[0].step) +
                               ": was a checkpoint of the same step restored on every rank?");
    }
    if (message.flags & kDamaged) {
      throw MalformedPayload("what rank " + std::to_string(rank) + " received was damaged");
    }
    if (message.flags & kNonFinite) note_nonfinite(g);
  }
  if (!messages.empty() && !messages[0].entries.empty()) {  // how long it was under way is its first member's
    Member& first = g.members.at(messages[0].entries[0].index);
    first.now.wait_s += std::chrono::duration<double>(Clock::now() - g.flights[bucket].sent).count();
  }
  if (measures_) note_times(g, group, bucket, messages, bytes);
  return messages;
}

void SessionState::finished(int64_t group, int64_t member, bool finite, double seconds) {
  const std::lock_guard lock(mutex_);
  Group& g = groups_.at(group);
  Member& m = g.members.at(member);
  if (!g.open || m.finished) return;
  m.now.decode_s = seconds;
  m.finished = true;
  if (!finite) note_nonfinite(g);
  if (g.nonfinite) take_back(m);
  if (++g.finished == g.members.size()) close(g);
}

std::shared_ptr<const Codec> SessionState::codec(int64_t group, int64_t member) {
  const std::lock_guard lock(mutex_);
  return segments_.at(groups_.at(group).members.at(member).segment).codec;
}

std::shared_ptr<void>& SessionState::attachment(int64_t segment) {
  const std::lock_guard lock(mutex_);
  return segments_.at(segment).attachment;
}

void SessionState::warn(const std::string& text) {
  std::function<void(const std::string&)> call;
  {
    const std::lock_guard lock(warning_mutex_);
    if (!warned_.insert(text).second) return;
    call = warning_;
  }
  if (call) call(text);
}

// Undoes what the member's encoding did to its residual.
void SessionState::take_back(Member& member) {
  if (member.undo_piece) member.undo_piece();
  member.undo_piece = nullptr;
  if (!member.undo) return;
  member.undo();
  member.undo = nullptr;
  member.now.residual_sq = segments_[member.segment].total.residual_sq;
}

void SessionState::note_nonfinite(Group& group) {
  group.nonfinite = true;
  for (Member& member : group.members) {
    if (member.finished) take_back(member);
  }
}

// Ends a round. A member that is not finished was never used: it is taken back.
void SessionState::close(Group& group) {
  if (!group.open) return;
  ++rounds_;
  segments_of_last_.clear();
  for (Member& member : group.members) {
    if (member.arrived) {
      if (!member.finished) take_back(member);
      member.now.rounds = 1;
      Segment& segment = segments_[member.segment];
      segment.last = member.now;
      segment.total.add(member.now);
      segments_of_last_.push_back(member.segment);
    }
    const int64_t segment = member.segment;
    member = Member();
    member.segment = segment;
  }
  group.finished = 0;
  group.open = group.nonfinite = false;
  group.flights.clear();
  if (measures_) meter_.finish_round();
  group.scopes.clear();
  group.deferred.clear();
}

namespace {
std::mutex sessions_mutex;
// Never destroyed: what the sessions keep for a framework must not outlive it.
std::deque<SessionState>& sessions() {
  static auto* all = new std::deque<SessionState>;
  return *all;
}
}  // namespace

int64_t make_session(uint64_t seed) {
  const std::lock_guard lock(sessions_mutex);
  sessions().emplace_back(seed);
  return static_cast<int64_t>(sessions().size()) - 1;
}

SessionState* find_session(int64_t number) {
  const std::lock_guard lock(sessions_mutex);
  return number >= 0 && number < static_cast<int64_t>(sessions().size()) ? &sessions()[number] : nullptr;
}

}  // namespace hvd_compress
