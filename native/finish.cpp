// The scalar end of a row, compiled once for every target so that no target's object holds libm's inline functions.
#include <cmath>
#include <limits>

#include "headwise.h"

namespace headwise {

namespace {

constexpr double kLn2 = 0.6931471805599453;

// The sink's logit above the row's maximum, units of log 2.
double sink_above(const Call& c, const Row& row) {
  return static_cast<double>(c.sinks[row.head]) / kLn2 - static_cast<double>(row.max);
}

}  // namespace

float finish_row(const Call& c, const Row& row, int64_t batch) {
  const int64_t at = (batch * c.H + row.head) * c.Q + row.query;
  const bool empty = row.visible == 0;
  const double sum = row.sum;
  double sink = 0.0, factor = empty ? 0.0 : 1.0 / sum;
  if (c.sinks) {
    const double e = empty ? 0.0 : std::exp2(sink_above(c, row));
    factor = empty ? 0.0 : 1.0 / (sum + e);
    sink = empty ? 1.0 : std::isinf(e) ? 1.0 : e / (sum + e);
  }
  if (c.sink) c.sink[at] = static_cast<float>(sink);
  if (c.top) c.top[at] = row.max;
  if (c.distance) c.distance[at] = empty ? 0.0f : static_cast<float>(row.distance / sum);
  if (!c.statistics) return static_cast<float>(factor);
  if (empty) {
    c.lse[at] = -std::numeric_limits<float>::infinity();
    c.entropy[at] = 0.0f;
    c.max_weight[at] = 0.0f;
    c.argmax[at] = -1;
    c.visible[at] = 0;
    return 0.0f;
  }
  const double log_sum = std::log(row.sum);
  // A visible score of +inf leaves no weights (inf - inf), but its log-sum-exp is known.
  c.lse[at] = std::isinf(row.max) && row.max > 0 ? row.max : static_cast<float>(row.max * kLn2 + log_sum);
  const double entropy = log_sum - kLn2 * (row.weighted / sum);
  c.entropy[at] = static_cast<float>(entropy < 0.0 ? 0.0 : entropy);
  c.max_weight[at] = static_cast<float>(factor);
  c.argmax[at] = row.argmax;
  c.visible[at] = row.visible;
  return static_cast<float>(factor);
}

float column_factor(const Call& c, int64_t row, int64_t head) {
  const double lse = c.lse[row];
  if (lse == -std::numeric_limits<double>::infinity()) return 0.0f;
  if (!c.sinks) return 1.0f;
  return static_cast<float>(1.0 / (1.0 + std::exp(static_cast<double>(c.sinks[head]) - lse)));
}

}  // namespace headwise
