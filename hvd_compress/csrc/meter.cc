#include "meter.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

namespace hvd_compress {
namespace {

constexpr size_t kSamples = 64;
constexpr size_t kFewest = 4;  // samples that a fit needs
constexpr uint64_t kFirst = 8, kAgain = 4, kPeriod = 1000;  // rounds that explore: the first ones, and so many in each period
constexpr double kFractions[] = {0.01, 0.001, 0.1, 0.0001};
constexpr double kLeastLatency = 1e-6, kLeastSecondsPerByte = Meter::kFastest;

// The last fit of each network.
struct Fits {
  std::mutex mutex;
  std::map<std::string, Step> by_network;
};
Fits& fits() {
  static auto* all = new Fits;
  return *all;
}

}  // namespace

void Meter::said(int64_t exchange, const std::vector<float>& seconds) {
  const auto before = sent_.find(exchange);
  if (before == sent_.end()) return;
  float shortest = std::numeric_limits<float>::infinity();
  for (const float each : seconds) {
    if (each > 0 && each < shortest) shortest = each;
  }
  if (std::isfinite(shortest)) said_[exchange] = {before->second, static_cast<double>(shortest)};
}

void Meter::sent(int64_t exchange, double bytes) { sending_[exchange] = bytes; }

void Meter::finish_round() {
  for (const auto& [exchange, bytes] : sending_) sent_[exchange] = bytes;
  for (const auto& [exchange, sample] : said_) samples_.push_back(sample);
  while (samples_.size() > kSamples) samples_.pop_front();
  if (!said_.empty()) fit();
  sending_.clear();
  said_.clear();
  ++rounds_;
  if (!network_.empty()) share();
}

Step Meter::step() const {
  Step step = step_;
  const uint64_t in_period = rounds_ % kPeriod;
  if (in_period < (rounds_ < kPeriod ? kFirst : kAgain)) step.explore = kFractions[in_period % std::size(kFractions)];
  return step;
}

void Meter::share() {
  const std::lock_guard lock(fits().mutex);
  if (fitted_) {
    fits().by_network[network_] = step_;
  } else if (const auto found = fits().by_network.find(network_); rounds_ >= kFirst && found != fits().by_network.end()) {
    step_ = found->second;
    borrowed_ = true;
  }
}

// Least absolute deviations, which a few exchanges that were held up do not move: the best line goes through two samples, or
// through one at the least slope or latency that is allowed.
void Meter::fit() {
  const auto [least, most] = std::minmax_element(samples_.begin(), samples_.end(),
                                                 [](const Sample& a, const Sample& b) { return a.bytes < b.bytes; });
  if (samples_.size() < kFewest || least->bytes == most->bytes) return;
  double best = std::numeric_limits<double>::infinity();
  const auto consider = [&](double latency, double slope) {
    if (!(latency >= kLeastLatency && slope >= kLeastSecondsPerByte)) return;
    double sum = 0;
    for (const Sample& sample : samples_) sum += std::abs(latency + slope * sample.bytes - sample.seconds);
    if (sum >= best) return;
    best = sum;
    step_.latency = latency;
    step_.seconds_per_byte = slope;
    fitted_ = true;
  };
  for (size_t i = 0; i < samples_.size(); ++i) {
    const Sample& a = samples_[i];
    consider(a.seconds - kLeastSecondsPerByte * a.bytes, kLeastSecondsPerByte);
    if (a.bytes > 0) consider(kLeastLatency, (a.seconds - kLeastLatency) / a.bytes);
    for (size_t j = 0; j < i; ++j) {
      const Sample& b = samples_[j];
      if (a.bytes == b.bytes) continue;
      const double slope = (a.seconds - b.seconds) / (a.bytes - b.bytes);
      consider(a.seconds - slope * a.bytes, slope);
    }
  }
}

}  // namespace hvd_compress
