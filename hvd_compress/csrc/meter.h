// Measures what an exchange costs: latency + seconds_per_byte times the bytes of a rank's message, fitted to the times that the
// last exchanges took. Every rank adds the same numbers, since they travel in the messages (see message.h), and so has the same
// fit, unless it is another compression's. Ranks need not agree: each chooses what it sends by itself.
//
// A fit needs messages of several sizes: in the first rounds, and for a few now and then, what is sent is not chosen but explored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "codec.h"

namespace hvd_compress {

class Meter {
 public:
  static constexpr double kFastest = 1e-12;  // seconds a byte: where a fit has no slope

  // Of several compressions that send at the same time on one network, named so, only the first to be waited for can tell how
  // long it took; a meter that has no fit of its own after the first rounds takes the last one that another of its network has made. Empty: it
  // does not.
  explicit Meter(std::string network = "") : network_(std::move(network)) {}

  // What each rank's message of an exchange says of the one before, in this round: the seconds that passed on that rank between
  // sending and receiving, 0 where that is not known. The shortest is that of the rank that waited for no other.
  void said(int64_t exchange, const std::vector<float>& seconds);

  // And how many bytes a rank sends in this one, on average.
  void sent(int64_t exchange, double bytes);

  // Ends a round.
  void finish_round();

  // For the next round; its seed is still to be made.
  Step step() const;

  // Whether it has a fit, its own or another's.
  bool is_fitted() const { return fitted_ || borrowed_; }

 private:
  struct Sample {
    double bytes, seconds;
  };

  void fit();
  void share();

  std::string network_;
  std::map<int64_t, double> sent_;     // by exchange: bytes in the last round that had it
  std::map<int64_t, double> sending_;  // in this round
  std::map<int64_t, Sample> said_;     // in this round, in whatever order
  std::deque<Sample> samples_;
  uint64_t rounds_ = 0;
  bool fitted_ = false, borrowed_ = false;
  Step step_;
};

}  // namespace hvd_compress
