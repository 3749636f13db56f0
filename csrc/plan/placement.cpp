// Places blocks of memory whose lifetimes are known: no two that live at the same time overlap, and the highest address is low.
//
// This is dynamic storage allocation, which is NP-hard. Blocks are placed in an order, each at the lowest address that is free
// during its life. The first orders are by size, by size times lifetime, by lifetime and by birth. Then a limit is set just below the
// best height so far; a block that ends above the limit moves to an earlier place of the order, and placing goes on from there
// ("Squeaky Wheel" Optimization, Joslin and Clements 1999). monet_like/replay/memory/placement.py calls it. Needs nothing but the C++ library.

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace {

using Bytes = std::int64_t;
using Index = std::int32_t;

// After so many moves in vain the search starts again, from another order.
constexpr std::int64_t kPatience = 4000;

struct Random {
  std::uint64_t state;

  // Uniform below `count`.
  std::uint64_t below(std::uint64_t count) {
    state += 0x9e3779b97f4a7c15;
    std::uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (z ^ (z >> 31)) % count;
  }
};

class Placer {
 public:
  Placer(Index count, const std::int64_t* begin, const std::int64_t* end, const Bytes* bytes)
      : count_(count), begin_(begin), end_(end), bytes_(bytes), others_(count), offset_(count), rank_(count), order_(count) {
    std::vector<Index> born(count), alive;
    std::iota(born.begin(), born.end(), 0);
    std::stable_sort(born.begin(), born.end(), [&](Index a, Index b) { return begin[a] < begin[b]; });
    for (const Index block : born) {
      std::erase_if(alive, [&](Index other) { return end[other] <= begin[block]; });
      Bytes there = bytes[block];
      for (const Index other : alive) {
        others_[block].push_back(other);
        others_[other].push_back(block);
        there += bytes[other];
      }
      least_ = std::max(least_, there);
      alive.push_back(block);
    }
  }

  // Offsets with which the height is at most `good_enough` bytes, or the best found in `most_steps` looks at a neighbour.
  Bytes run(Bytes good_enough, std::int64_t most_steps, std::uint64_t seed, Bytes* offsets) {
    Random random{seed};
    Bytes best = -1;
    std::array<std::vector<Index>, kOrders> first;
    for (int kind = 0; kind < kOrders; ++kind) {
      sort(kind);
      first[kind] = order_;
      place(0, kNoLimit);
      keep(best, offsets);
    }
    const Bytes goal = std::max(least_, good_enough);
    for (int start = 0; best > goal && steps_ < most_steps; ++start) {
      order_ = first[start % kOrders];
      Index from = 0;
      std::int64_t vain = 0;
      while (best > goal && steps_ < most_steps && vain < kPatience) {
        number_from(from);
        const Index failed = place(from, best - 1);
        if (failed == count_) {
          keep(best, offsets);
          from = vain = 0;
          continue;
        }
        ++vain;
        if (failed == 0) return best;  // one block alone
        // Mostly a little earlier, sometimes far.
        const Index back = 1 + static_cast<Index>(random.below(1 + random.below(failed)));
        from = failed - back;
        std::rotate(order_.begin() + from, order_.begin() + failed, order_.begin() + failed + 1);
      }
    }
    return best;
  }

 private:
  static constexpr int kOrders = 4;
  static constexpr Bytes kNoLimit = INT64_MAX;

  void sort(int kind) {
    std::iota(order_.begin(), order_.end(), 0);
    auto by = [&](auto key) {
      std::stable_sort(order_.begin(), order_.end(), [&](Index a, Index b) { return key(a) > key(b); });
    };
    const auto life = [&](Index i) { return end_[i] - begin_[i]; };
    if (kind == 0) by([&](Index i) { return bytes_[i]; });
    if (kind == 1) by([&](Index i) { return static_cast<double>(bytes_[i]) * static_cast<double>(life(i)); });
    if (kind == 2) by([&](Index i) { return std::pair(life(i), bytes_[i]); });
    if (kind == 3) by([&](Index i) { return std::pair(-begin_[i], bytes_[i]); });
    number_from(0);
  }

  void number_from(Index position) {
    for (; position < count_; ++position) rank_[order_[position]] = position;
  }

  // Place the blocks from position `from` of the order on; returns the position of the first that ends above `limit`.
  Index place(Index from, Bytes limit) {
    for (Index position = from; position < count_; ++position) {
      const Index block = order_[position];
      busy_.clear();
      for (const Index other : others_[block]) {
        if (rank_[other] < position) busy_.emplace_back(offset_[other], offset_[other] + bytes_[other]);
      }
      steps_ += 1 + static_cast<std::int64_t>(others_[block].size());
      std::sort(busy_.begin(), busy_.end());
      Bytes at = 0;
      for (const auto& [first, last] : busy_) {
        if (first - at >= bytes_[block]) break;
        at = std::max(at, last);
      }
      if (at + bytes_[block] > limit) return position;
      offset_[block] = at;
    }
    return count_;
  }

  void keep(Bytes& best, Bytes* offsets) {
    Bytes height = 0;
    for (Index block = 0; block < count_; ++block) height = std::max(height, offset_[block] + bytes_[block]);
    if (best >= 0 && height >= best) return;
    best = height;
    std::copy(offset_.begin(), offset_.end(), offsets);
  }

  Index count_;
  const std::int64_t *begin_, *end_;
  const Bytes* bytes_;
  std::vector<std::vector<Index>> others_;  // blocks that live at the same time
  std::vector<Bytes> offset_;
  std::vector<Index> rank_, order_;
  std::vector<std::pair<Bytes, Bytes>> busy_;
  Bytes least_ = 0;  // the most that lives at one time
  std::int64_t steps_ = 0;
};

}  // namespace

extern "C" {

// A block lives from `begin` until just before `end`. Returns the height, and the blocks' offsets.
__attribute__((visibility("default"))) std::int64_t monet_like_place(std::int32_t count, const std::int64_t* begin,
                                                                     const std::int64_t* end, const std::int64_t* bytes,
                                                                     std::int64_t good_enough, std::int64_t most_steps,
                                                                     std::uint64_t seed, std::int64_t* offsets) {
  return count == 0 ? 0 : Placer(count, begin, end, bytes).run(good_enough, most_steps, seed, offsets);
}

}  // extern "C"
