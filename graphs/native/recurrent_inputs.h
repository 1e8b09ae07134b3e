// The short causal convolution of recurrent layers: each feature of a position with those of the positions before it, then SiLU.

#pragma once

#include "common.h"
#include "gates.h"

namespace xla_engine {

// The lanes of a call, of `positions` rows each. The first count[lane] of them go on in slot[lane] at position start[lane].
struct Lanes {
  const int32_t *slot, *start, *count;
  int64_t number, positions;
};

// The inputs of a convolution: rows of the call, and `kept` earlier ones of every slot, `inputs` [B, kept, features].
class Windows {
 public:
  Windows(const Lanes& lanes, int64_t kept, int64_t features, const float* rows, int64_t pitch, const float* inputs)
      : lanes_(lanes), kept_(kept), rows_(rows), pitch_(pitch), before_(lanes.number * kept) {
    thread_local std::vector<float> zeros;
    if (static_cast<int64_t>(zeros.size()) < features) zeros.resize(features);
    if (lanes.number > 0) last_.resize(*std::max_element(lanes.slot, lanes.slot + lanes.number) + 1, -1);
    for (int64_t lane = 0; lane < lanes.number; ++lane) {
      if (lanes.count[lane] <= 0) continue;
      int64_t& earlier = last_[lanes.slot[lane]];  // a lane may go on where one before it ended
      for (int64_t place = 0; place < kept; ++place) {
        const float*& row = before_[lane * kept + place];
        if (lanes.start[lane] == 0)
          row = zeros.data();
        else if (earlier >= 0)
          row = At(earlier, lanes.count[earlier] - kept + place);
        else
          row = inputs + (lanes.slot[lane] * kept + place) * features;
      }
      earlier = lane;
    }
  }

  int64_t kept() const { return kept_; }

  // The input at a position of a lane, from -kept on.
  const float* At(int64_t lane, int64_t position) const {
    if (position < 0) return before_[(lane + 1) * kept_ + position];
    return rows_ + (lane * lanes_.positions + position) * pitch_;
  }

  // Writes the slot's inputs after a lane, unless a later lane goes on in the slot. `inputs` may be what this was made of: each
  // row moves towards the first.
  void Keep(int64_t lane, int64_t features, float* inputs) const {
    const int64_t count = lanes_.count[lane];
    if (count <= 0 || last_[lanes_.slot[lane]] != lane) return;
    for (int64_t place = 0; place < kept_; ++place)
      std::memmove(inputs + (lanes_.slot[lane] * kept_ + place) * features, At(lane, count - kept_ + place),
                   features * sizeof(float));
  }

 private:
  const Lanes& lanes_;
  int64_t kept_;
  const float* rows_;
  int64_t pitch_;
  std::vector<const float*> before_;
  std::vector<int64_t> last_;  // lane of each slot
};

// Filters [features, kernel], oldest position first, and a bias or null.
struct Filters {
  const float *weights, *bias;
  int64_t kernel;

  // Those of `width` features from `first` on, as [kernel, width].
  const float* Turned(int64_t first, int64_t width) const {
    thread_local std::vector<float> turned;
    turned.resize(kernel * width);
    const float* from = weights + first * kernel;
    if (kernel == 4)
      Turn<4>(from, width, turned.data());
    else
      for (int64_t tap = 0; tap < kernel; ++tap)
        for (int64_t feature = 0; feature < width; ++feature) turned[tap * width + feature] = from[feature * kernel + tap];
    return turned.data();
  }

 private:
  template <int taps>
  static void Turn(const float* from, int64_t width, float* to) {
    for (int64_t feature = 0; feature < width; ++feature)
      for (int tap = 0; tap < taps; ++tap) to[tap * width + feature] = from[feature * taps + tap];
  }
};

// SiLU of the convolution of `width` features from `first` on, at one position. turned: their filters.
template <int64_t fixed>
void ConvolveWith(const Windows& windows, const Filters& filters, const float* turned, int64_t lane, int64_t position,
                  int64_t first, int64_t width, float* to) {
  const int64_t kernel = fixed ? fixed : filters.kernel;
  const float* rows[fixed ? fixed : 16];
  for (int64_t tap = 0; tap < kernel; ++tap) rows[tap] = windows.At(lane, position - windows.kept() + tap) + first;
  for (int64_t feature = 0; feature < width; feature += kVector) {
    Vec total = Load(rows[0] + feature) * Load(turned + feature);
    for (int64_t tap = 1; tap < kernel; ++tap)
      total = Fused(Load(rows[tap] + feature), Load(turned + tap * width + feature), total);
    if (filters.bias) total = total + Load(filters.bias + first + feature);
    Store(to + feature, total * Logistic(total));
  }
}

inline void Convolve(const Windows& windows, const Filters& filters, const float* turned, int64_t lane, int64_t position,
                     int64_t first, int64_t width, float* to) {
  (filters.kernel == 4 ? ConvolveWith<4> : ConvolveWith<0>)(windows, filters, turned, lane, position, first, width, to);
}

}  // namespace xla_engine
