// The planner's local search: turns policies into schedules, evaluates them, and improves them by simulated annealing.
//
// monet_like/plan/local_search/policy.py describes the method. judge.py there evaluates policies in Python:
// same arrays and same order of floating-point operations, hence the same answer to the bit. Needs nothing but the C++
// library.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr std::int32_t kNever = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kMostEarly = 2;    // the most slots at which a value may be recomputed before its use
constexpr std::int64_t kMostAhead = 5;  // the most stages between an early recomputation and the use
constexpr std::uint8_t kFirst = 1;
constexpr std::uint8_t kAgain = 2;

}  // namespace

extern "C" {

// Lists of lists are (start, entries): the entries of list i are entries[start[i]] .. entries[start[i + 1]].
struct Tables {
  std::int64_t values, classes, slots;
  std::int64_t resident, output_bytes;
  const std::int64_t* bytes;       // per value
  const std::uint8_t* output;      // per value
  const std::int32_t *read_start, *reads;        // class -> values
  const std::int32_t *write_start, *writes;      // class -> values
  const std::int64_t* written;                   // class -> bytes of its writes
  const std::uint8_t* shared;                    // class -> writes an output that another class writes too
  const std::uint8_t* once;                      // class -> a member runs only first: no other may write its values there
  const double *first_seconds, *again_seconds;   // class -> of its fastest member; infinity: none
  const std::int32_t* member_start;              // class -> members, fastest first
  const double* member_seconds;
  const std::int64_t* member_extra;              // workspace, minus the storage taken over
  const std::int32_t* member_taken;              // value taken over, or -1
  const std::uint8_t* member_runs;               // kFirst | kAgain
  const std::int32_t *first_start, *first;       // value -> classes that may make it in the forward, ascending
  const std::int32_t *again_start, *again;       // value -> classes that may make it again, ascending
  const std::int32_t* option_start;              // slot -> options: ways that read the same
  const std::int32_t *option_read_start, *option_reads;  // option -> values
  const std::int32_t* way_start;                 // option -> ways, fastest first
  const double* way_seconds;
  const std::int64_t* way_extra;
  const std::int64_t *before, *during;           // slot -> bytes of backward values
  const std::int32_t *use_start, *uses;          // value -> slots that may read it, ascending
  const std::int32_t* stages;                    // slots before which a task may run again, ascending
  const std::int32_t* ends;                      // value -> how many of these come up to the last that can use it
};

struct Policy {
  std::uint8_t *keep, *hold;  // per value
  std::int32_t* cut;          // per value: not carried beyond this slot
  std::int32_t* early;        // kMostEarly per value: made before this slot, if not present
  std::int32_t* option;       // per slot
  std::int32_t* prefer;       // per value: class that makes it in the forward, or -1
};

struct Judgement {
  double seconds;
  std::int64_t peak;
  double excess;  // sum over all runs of bytes over the budget
  std::int64_t steps;
};

// The schedule that `judge` found: member indices, those of the forward ascending; ways are per slot.
struct Runs {
  std::int32_t *forward, *again, *again_start, *way;
  std::int64_t forward_count, again_count;
};

struct Settings {
  std::int64_t budget, evaluations, most_steps;
  std::uint64_t seed;
  double first_weight, last_weight, first_temperature, last_temperature;
  std::int64_t candidate_count, choice_count, prefer_count;
  const std::int32_t *candidates, *choices, *preferring;
};

}  // extern "C"

namespace {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  double unit() {  // splitmix64
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
  }
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(unit() * static_cast<double>(n)); }

 private:
  std::uint64_t state_;
};

template <class T>
struct Span {
  const T *from, *to;
  const T* begin() const { return from; }
  const T* end() const { return to; }
  std::size_t size() const { return static_cast<std::size_t>(to - from); }
};

template <class T>
Span<T> list(const std::int32_t* start, const T* entries, std::int64_t i) {
  return {entries + start[i], entries + start[i + 1]};
}

class Judge {
 public:
  explicit Judge(const Tables& t)
      : t_(t),
        present_(t.values),
        price_(t.values),
        maker_(t.values),
        priced_(t.values, 0),
        chosen_(t.classes, 0),
        wanted_(t.values),
        written_(t.values),
        fresh_(t.values, 0),
        again_start_(t.slots + 1),
        early_(t.slots),
        next_(t.values * kMostEarly) {}

  // The cost of a policy under a budget; false if it cannot be carried out.
  bool run(const Policy& p, std::int64_t budget, Judgement& out, Runs* runs) {
    if (!derive(p)) return false;
    return account(p, budget, out, runs);
  }

 private:
  const Tables& t_;
  std::vector<std::uint8_t> present_;
  std::vector<double> price_;
  std::vector<std::int32_t> maker_;
  std::vector<std::int64_t> priced_, chosen_;
  std::vector<std::uint8_t> wanted_;
  std::vector<std::uint8_t> written_;  // in the forward: 1, or 2 by what runs only once
  std::vector<std::int64_t> fresh_;
  std::vector<std::int32_t> again_, again_start_, pending_, order_, cuts_, needed_;
  std::vector<std::int32_t> early_, next_;  // slot -> its first entry of `Policy::early`, entry -> the next one, or -1
  std::int64_t stamp_ = 0, run_stamp_ = 0;

  // From the first slot to the last: the classes that run again just before the slot that needs their results.
  bool derive(const Policy& p) {
    cuts_.clear();
    std::fill(early_.begin(), early_.end(), -1);
    for (std::int64_t i = t_.values * kMostEarly - 1; i >= 0; --i) {
      if (p.early[i] == kNever || t_.output[i / kMostEarly]) continue;
      next_[i] = early_[p.early[i]];
      early_[p.early[i]] = static_cast<std::int32_t>(i);
    }
    for (std::int64_t v = 0; v < t_.values; ++v) {
      present_[v] = p.keep[v] | t_.output[v];
      if (p.cut[v] != kNever) cuts_.push_back(static_cast<std::int32_t>(v));
    }
    again_.clear();
    for (std::int64_t slot = 0; slot < t_.slots; ++slot) {
      again_start_[slot] = static_cast<std::int32_t>(again_.size());
      const std::int64_t option = t_.option_start[slot] + p.option[slot];
      const auto reads = list(t_.option_read_start, t_.option_reads, option);
      needed_.assign(reads.begin(), reads.end());
      for (std::int32_t i = early_[slot]; i >= 0; i = next_[i]) needed_.push_back(i / kMostEarly);
      if (!make()) return false;
      for (std::size_t i = again_start_[slot]; i < again_.size(); ++i) {
        for (std::int32_t v : list(t_.write_start, t_.writes, again_[i])) {
          if (p.hold[v] && slot < p.cut[v]) present_[v] = 1;
        }
      }
      for (std::int32_t v : cuts_) {
        if (p.cut[v] == slot && !t_.output[v]) present_[v] = 0;
      }
      for (std::size_t i = reads.size(); i < needed_.size(); ++i) present_[needed_[i]] = 1;
    }
    again_start_[t_.slots] = static_cast<std::int32_t>(again_.size());
    return true;
  }

  // Append the classes that make the needed values that are not present.
  bool make() {
    pending_.clear();
    ++stamp_;
    for (std::int32_t v : needed_) {
      if (present_[v]) continue;
      estimate(v);
      if (std::isinf(price_[v])) return false;
      pending_.push_back(v);
    }
    const std::size_t begin = again_.size();
    while (!pending_.empty()) {
      const std::int32_t v = pending_.back();
      pending_.pop_back();
      const std::int32_t c = maker_[v];
      if (chosen_[c] == stamp_) continue;
      chosen_[c] = stamp_;
      again_.push_back(c);
      for (std::int32_t u : list(t_.read_start, t_.reads, c)) {
        if (!present_[u]) pending_.push_back(u);
      }
    }
    std::sort(again_.begin() + static_cast<std::ptrdiff_t>(begin), again_.end());
    return true;
  }

  // Seconds to make v again, each ancestor counted as often as it is read; without recursion, for deep models.
  void estimate(std::int32_t wanted) {
    if (priced_[wanted] == stamp_) return;
    order_.clear();
    order_.push_back(wanted);
    while (!order_.empty()) {
      const std::int32_t v = order_.back();
      if (priced_[v] == stamp_) {
        order_.pop_back();
        continue;
      }
      bool ready = true;
      for (std::int32_t c : list(t_.again_start, t_.again, v)) {
        for (std::int32_t u : list(t_.read_start, t_.reads, c)) {
          if (!present_[u] && priced_[u] != stamp_) {
            order_.push_back(u);
            ready = false;
          }
        }
      }
      if (!ready) continue;
      order_.pop_back();
      double best = std::numeric_limits<double>::infinity();
      std::int32_t maker = -1;
      for (std::int32_t c : list(t_.again_start, t_.again, v)) {
        double cost = t_.again_seconds[c];
        for (std::int32_t u : list(t_.read_start, t_.reads, c)) {
          if (!present_[u]) cost += price_[u];
        }
        if (cost < best) {
          best = cost;
          maker = c;
        }
      }
      priced_[v] = stamp_;
      price_[v] = best;
      maker_[v] = maker;
    }
  }

  // From the last run back to the first: the values still needed give the memory of each run, hence the fastest member
  // that fits.
  bool account(const Policy& p, std::int64_t budget, Judgement& out, Runs* runs) {
    out = {0.0, 0, 0.0, 0};
    std::fill(wanted_.begin(), wanted_.end(), 0);
    std::fill(written_.begin(), written_.end(), 0);
    std::int64_t alive = 0;
    const std::int64_t fixed = t_.resident + t_.output_bytes;
    if (runs) runs->again_count = runs->forward_count = 0;
    for (std::int64_t slot = t_.slots - 1; slot >= 0; --slot) {
      const std::int64_t option = t_.option_start[slot] + p.option[slot];
      for (std::int32_t v : list(t_.option_read_start, t_.option_reads, option)) want(v, alive);
      const std::int32_t way = pick_way(option, fixed + t_.during[slot] + alive, budget, out);
      if (runs) runs->way[slot] = way;
      for (std::int32_t i = again_start_[slot + 1] - 1; i >= again_start_[slot]; --i) {
        const std::int32_t member = settle(again_[i], kAgain, fixed + t_.before[slot], budget, alive, out);
        if (runs && member >= 0) runs->again[runs->again_count++] = member;
      }
      if (runs) runs->again_start[slot] = static_cast<std::int32_t>(runs->again_count);
    }
    for (std::int64_t v = 0; v < t_.values; ++v) {
      if (t_.output[v]) {
        wanted_[v] = 1;
        alive += t_.bytes[v];
      }
    }
    for (std::int64_t c = t_.classes - 1; c >= 0; --c) {
      const int verdict = forward_runs(p, static_cast<std::int32_t>(c));
      if (verdict < 0) return false;
      if (verdict == 0) continue;
      const std::int32_t member = settle(static_cast<std::int32_t>(c), kFirst, t_.resident, budget, alive, out);
      if (member < 0) return false;
      if (runs) runs->forward[runs->forward_count++] = member;
      for (std::int32_t v : list(t_.write_start, t_.writes, c)) written_[v] = static_cast<std::uint8_t>(1 + t_.once[c]);
    }
    for (std::int64_t v = 0; v < t_.values; ++v) {
      if (wanted_[v]) return false;
    }
    return true;
  }

  void want(std::int32_t v, std::int64_t& alive) {
    if (wanted_[v] || t_.output[v]) return;
    wanted_[v] = 1;
    alive += t_.bytes[v];
  }

  void count(std::int64_t memory, double seconds, std::int64_t budget, Judgement& out) {
    out.seconds += seconds;
    out.peak = std::max(out.peak, memory);
    if (memory > budget) out.excess += static_cast<double>(memory - budget);
    ++out.steps;
  }

  std::int32_t pick_way(std::int64_t option, std::int64_t memory, std::int64_t budget, Judgement& out) {
    std::int32_t best = t_.way_start[option];
    for (std::int32_t k = best; k < t_.way_start[option + 1]; ++k) {
      if (memory + t_.way_extra[k] <= budget) {
        best = k;
        break;
      }
      if (t_.way_extra[k] < t_.way_extra[best]) best = k;
    }
    count(memory + t_.way_extra[best], t_.way_seconds[best], budget, out);
    return best;
  }

  // Run one class: before it, its results are no longer needed and its reads are. Returns the member, or -1 if no result is
  // needed.
  std::int32_t settle(std::int32_t c, std::uint8_t runs, std::int64_t fixed, std::int64_t budget, std::int64_t& alive,
                      Judgement& out) {
    bool useful = false;
    for (std::int32_t v : list(t_.write_start, t_.writes, c)) {
      if (!wanted_[v]) continue;
      useful = true;
      wanted_[v] = 0;
      alive -= t_.bytes[v];
    }
    if (!useful) return -1;
    ++run_stamp_;
    for (std::int32_t u : list(t_.read_start, t_.reads, c)) {
      if (wanted_[u] || t_.output[u]) continue;
      wanted_[u] = 1;
      fresh_[u] = run_stamp_;
      alive += t_.bytes[u];
    }
    const std::int64_t memory = fixed + alive + t_.written[c];
    std::int32_t best = -1;
    for (std::int32_t m = t_.member_start[c]; m < t_.member_start[c + 1]; ++m) {
      if (!(t_.member_runs[m] & runs)) continue;
      if (t_.member_taken[m] >= 0 && fresh_[t_.member_taken[m]] != run_stamp_) continue;
      if (memory + t_.member_extra[m] <= budget) {
        best = m;
        break;
      }
      if (best < 0 || t_.member_extra[m] < t_.member_extra[best]) best = m;
    }
    if (best < 0) return -1;
    count(memory + t_.member_extra[best], t_.member_seconds[best], budget, out);
    return best;
  }

  // Whether the forward runs class c, once all later ones are decided: 1, 0, or -1 if the policy cannot be carried out.
  int forward_runs(const Policy& p, std::int32_t c) {
    if (std::isinf(t_.first_seconds[c])) return 0;
    bool useful = false, alone = false, preferred = false, elsewhere = false, twice = false;
    for (std::int32_t v : list(t_.write_start, t_.writes, c)) {
      if (written_[v] + t_.once[c] > 1) twice = true;
      if (!wanted_[v]) continue;
      useful = true;
      if (t_.first[t_.first_start[v]] == c) alone = true;
      if (p.prefer[v] == c) preferred = true;
      else if (p.prefer[v] >= 0 && p.prefer[v] < c) elsewhere = true;
    }
    if (!useful) return 0;
    if (twice || (t_.shared[c] && conflicts(c))) return alone ? -1 : 0;
    if (alone) return 1;
    if (covered(c)) return 0;
    if (preferred) return 1;
    if (elsewhere) return 0;
    return cheapest(c) ? 1 : 0;
  }

  bool writes(std::int32_t c, std::int32_t v) const {
    for (std::int32_t w : list(t_.write_start, t_.writes, c)) {
      if (w == v) return true;
    }
    return false;
  }

  bool share(std::int32_t c, std::int32_t d) const {
    for (std::int32_t v : list(t_.write_start, t_.writes, c)) {
      if (t_.output[v] && writes(d, v)) return true;
    }
    return false;
  }

  // Whether c would write an output a second time, or keep the only maker of another wanted value from running.
  bool conflicts(std::int32_t c) const {
    for (std::int32_t o : list(t_.write_start, t_.writes, c)) {
      if (!t_.output[o]) continue;
      if (!wanted_[o]) return true;
      for (std::int32_t d : list(t_.first_start, t_.first, o)) {
        if (d == c) continue;
        for (std::int32_t v : list(t_.write_start, t_.writes, d)) {
          if (!wanted_[v] || writes(c, v)) continue;
          bool only = true;
          for (std::int32_t e : list(t_.first_start, t_.first, v)) {
            if (e < c && !share(e, c)) only = false;
          }
          if (only) return true;
        }
      }
    }
    return false;
  }

  // Whether an earlier class that must run for another value makes all values that c would be run for.
  bool covered(std::int32_t c) const {
    for (std::int32_t v : list(t_.write_start, t_.writes, c)) {
      if (!wanted_[v]) continue;
      for (std::int32_t d : list(t_.first_start, t_.first, v)) {
        if (d >= c) break;
        bool all = true, must = false;
        for (std::int32_t u : list(t_.write_start, t_.writes, c)) {
          if (wanted_[u] && !writes(d, u)) all = false;
        }
        for (std::int32_t u : list(t_.write_start, t_.writes, d)) {
          if (!wanted_[u] || writes(c, u)) continue;
          const auto makers = list(t_.first_start, t_.first, u);
          must |= *makers.begin() == d && (makers.size() == 1 || *(makers.begin() + 1) > c);
        }
        if (all && must) return true;
      }
      break;  // a class that covers c also makes its first needed result
    }
    return false;
  }

  double effort(std::int32_t c) const {
    double cost = t_.first_seconds[c];
    for (std::int32_t u : list(t_.read_start, t_.reads, c)) {
      if (wanted_[u]) continue;
      double least = std::numeric_limits<double>::infinity();
      for (std::int32_t d : list(t_.first_start, t_.first, u)) least = std::min(least, t_.first_seconds[d]);
      if (!std::isinf(least)) cost += least;
    }
    return cost;
  }

  bool cheapest(std::int32_t c) const {
    const double mine = effort(c);
    for (std::int32_t v : list(t_.write_start, t_.writes, c)) {
      if (!wanted_[v]) continue;
      for (std::int32_t d : list(t_.first_start, t_.first, v)) {
        if (d >= c) break;
        if (effort(d) < mine && !(t_.shared[d] && conflicts(d))) return false;  // a blocked one is no alternative
      }
    }
    return true;
  }
};

double penalised(const Judgement& j, const Settings& s, double weight) {
  const double budget = static_cast<double>(s.budget);
  const double over = j.peak > s.budget ? static_cast<double>(j.peak - s.budget) / budget : 0.0;
  return j.seconds * (1.0 + weight * (over + j.excess / (budget * static_cast<double>(j.steps + 1))));
}

bool better(const Judgement& a, const Judgement& b, std::int64_t budget) {
  const std::int64_t left = std::max<std::int64_t>(0, a.peak - budget), right = std::max<std::int64_t>(0, b.peak - budget);
  return left != right ? left < right : a.seconds < b.seconds;
}

// Makes one to four random changes, and undoes them. They are often near each other, because neighbouring values can replace
// one another; otherwise far apart, where one change frees the memory that another takes.
class Changes {
 public:
  Changes(const Tables& t, const Policy& p, const Settings& s, Random& random) : t_(t), p_(p), s_(s), random_(random) {}

  void apply() {
    undo_.clear();
    if (s_.candidate_count && random_.unit() < 0.1) {
      repeat();
      return;
    }
    std::int64_t centre = 0;
    const std::int64_t turns = 1 + random_.below(4);
    for (std::int64_t i = 0; i < turns; ++i) {
      if (s_.candidate_count && (!i || random_.unit() < 0.4)) centre = random_.below(s_.candidate_count);
      const double kind = random_.unit();
      if (s_.choice_count && (kind < 0.1 || !s_.candidate_count)) {
        option(s_.choices[random_.below(s_.choice_count)]);
      } else if (s_.prefer_count && kind < 0.15) {
        prefer(s_.preferring[random_.below(s_.prefer_count)]);
      } else if (s_.candidate_count) {
        const std::int64_t near = centre + random_.below(13) - 6;
        const std::int32_t v = s_.candidates[std::min(s_.candidate_count - 1, std::max<std::int64_t>(0, near))];
        const auto uses = list(t_.use_start, t_.uses, v);
        if (kind < 0.35 && uses.size()) option(*(uses.begin() + random_.below(static_cast<std::int64_t>(uses.size()))));
        else if (kind < 0.75) set(p_.keep, v, static_cast<std::uint8_t>(!p_.keep[v]));
        else if (kind < 0.95) set(p_.hold, v, static_cast<std::uint8_t>(!p_.hold[v]));
        else if (kind < 0.975) cut(v);
        else early(v);
      }
    }
  }

  void revert() {
    for (auto change = undo_.rbegin(); change != undo_.rend(); ++change) {
      if (change->small) *change->small = static_cast<std::uint8_t>(change->old);
      else *change->large = change->old;
    }
  }

 private:
  struct Change {
    std::uint8_t* small;
    std::int32_t* large;
    std::int32_t old;
  };
  const Tables& t_;
  const Policy& p_;
  const Settings& s_;
  Random& random_;
  std::vector<Change> undo_;

  void set(std::uint8_t* field, std::int32_t i, std::uint8_t to) {
    undo_.push_back({field + i, nullptr, field[i]});
    field[i] = to;
  }
  void set(std::int32_t* field, std::int32_t i, std::int32_t to) {
    undo_.push_back({nullptr, field + i, field[i]});
    field[i] = to;
  }
  void option(std::int32_t slot) {
    set(p_.option, slot, static_cast<std::int32_t>(random_.below(t_.option_start[slot + 1] - t_.option_start[slot])));
  }
  // Copy the decisions of one stretch of values to another: models are made of blocks that repeat.
  void repeat() {
    const std::int64_t length = 1 + random_.below(12);
    const std::int64_t to = random_.below(s_.candidate_count), from = random_.below(s_.candidate_count);
    for (std::int64_t i = 0; i < length; ++i) {
      if (to + i >= s_.candidate_count || from + i >= s_.candidate_count) return;
      const std::int32_t v = s_.candidates[to + i], like = s_.candidates[from + i];
      const auto uses = list(t_.use_start, t_.uses, v), others = list(t_.use_start, t_.uses, like);
      if (uses.size() != others.size()) return;
      if (p_.keep[v] != p_.keep[like]) set(p_.keep, v, p_.keep[like]);
      if (p_.hold[v] != p_.hold[like]) set(p_.hold, v, p_.hold[like]);
      for (std::size_t k = 0; k < uses.size(); ++k) {
        const std::int32_t slot = uses.from[k], other = others.from[k];
        const std::int32_t chosen = p_.option[other];
        if (chosen < t_.option_start[slot + 1] - t_.option_start[slot]) set(p_.option, slot, chosen);
      }
    }
  }
  void prefer(std::int32_t v) {
    const auto makers = list(t_.first_start, t_.first, v);
    const std::int64_t i = random_.below(static_cast<std::int64_t>(makers.size()) + 1);
    set(p_.prefer, v, i == static_cast<std::int64_t>(makers.size()) ? -1 : *(makers.begin() + i));
  }
  void cut(std::int32_t v) {
    const auto uses = list(t_.use_start, t_.uses, v);
    const std::int64_t i = random_.below(static_cast<std::int64_t>(uses.size()) + 1);
    set(p_.cut, v, i == static_cast<std::int64_t>(uses.size()) ? kNever : *(uses.begin() + i));
  }
  void early(std::int32_t v) {
    const auto uses = list(t_.use_start, t_.uses, v);
    std::int64_t end = t_.ends[v];
    if (uses.size() && random_.unit() < 0.7) {
      const std::int32_t use = *(uses.begin() + random_.below(static_cast<std::int64_t>(uses.size())));
      end = std::lower_bound(t_.stages, t_.stages + end, use) - t_.stages;
    }
    const std::int64_t place = end - random_.below(kMostAhead + 1);
    const std::int32_t entry = v * kMostEarly + static_cast<std::int32_t>(random_.below(kMostEarly));
    set(p_.early, entry, place >= 0 && place < end ? t_.stages[place] : kNever);
  }
};

void copy(const Tables& t, const Policy& from, const Policy& to) {
  std::copy_n(from.keep, t.values, to.keep);
  std::copy_n(from.hold, t.values, to.hold);
  std::copy_n(from.cut, t.values, to.cut);
  std::copy_n(from.early, t.values * kMostEarly, to.early);
  std::copy_n(from.option, t.slots, to.option);
  std::copy_n(from.prefer, t.values, to.prefer);
}

}  // namespace

extern "C" {

// The sizes of the structures; a caller whose structures differ is refused.
__attribute__((visibility("default"))) std::int64_t monet_like_sizes(int which) {
  return which == 0 ? sizeof(Tables) : which == 1 ? sizeof(Policy) : which == 2 ? sizeof(Settings) : sizeof(Runs);
}

__attribute__((visibility("default"))) int monet_like_judge(const Tables* t, const Policy* p, std::int64_t budget,
                                                            Judgement* out, Runs* runs) {
  return Judge(*t).run(*p, budget, *out, runs) ? 1 : 0;
}

// Simulated annealing from `current`; `best` receives the fastest policy that fits, or the one nearest to fitting.
// Returns how many policies were judged.
__attribute__((visibility("default"))) std::int64_t monet_like_improve(const Tables* t, const Policy* current,
                                                                       const Policy* best, const Settings* s) {
  Judge judge(*t);
  Random random(s->seed);
  Judgement now{}, top{}, tried{};
  if (!judge.run(*current, s->budget, now, nullptr)) return 0;
  copy(*t, *current, *best);
  top = now;
  Changes changes(*t, *current, *s, random);
  std::int64_t turn = 0, steps = 0;
  for (; turn < s->evaluations; ++turn) {
    const double cooled = std::max(static_cast<double>(turn) / static_cast<double>(s->evaluations),
                                   static_cast<double>(steps) / static_cast<double>(s->most_steps));
    if (cooled >= 1.0) break;
    changes.apply();
    const bool legal = judge.run(*current, s->budget, tried, nullptr);
    steps += legal ? tried.steps : t->slots;
    const double weight = s->first_weight * std::pow(s->last_weight / s->first_weight, cooled);
    const double temperature = s->first_temperature * std::pow(s->last_temperature / s->first_temperature, cooled);
    const double slack = -temperature * now.seconds * std::log(1.0 - random.unit());
    if (!legal || penalised(tried, *s, weight) > penalised(now, *s, weight) + slack) {
      changes.revert();
      continue;
    }
    now = tried;
    if (better(now, top, s->budget)) {
      top = now;
      copy(*t, *current, *best);
    }
  }
  return turn;
}

}  // extern "C"
