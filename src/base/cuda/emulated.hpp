// instructions.hpp for hosts, so that tests run kernels written for CUDA without a device. Threads
// of a block are contexts of one thread of the host, which run in an order drawn by a seed from one
// exchange to the next: a missing barrier shows. Copies to shared memory happen when they are
// waited for, and not before. (swapcontext would ask the system for the signal mask each time: it
// only begins a context.)
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kvzap/core/types.hpp>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#define KVZAP_CUDA inline
#define KVZAP_CUDA_KERNEL(threads, blocks) void
#define KVZAP_CUDA_ARGUMENT const
#define KVZAP_UNROLL
#define KVZAP_UNROLL_BY_4

namespace kvzap::base::cuda {

struct FloatPair {
  float lower, upper;
};

}  // namespace kvzap::base::cuda

namespace kvzap::base::cuda::emulated {

struct Copy {
  std::uint32_t target;
  const void* source;
  bool exists;
};

/// Threads that wait for each other, and what they exchange.
struct Party {
  int size = 0, arrived = 0;
  std::uint64_t meetings = 0;
  // By parity of meetings and by member: no member is two exchanges ahead of another.
  std::vector<std::array<std::uint64_t, 6>> passed[2];

  void set_size(int members) {
    size = members;
    for (auto& of_parity : passed) of_parity.resize(members);
  }
};

/// Where a context goes on.
struct Place {
  void* of_builtin[5];
};

struct Thread {
  ucontext_t beginning{};
  Place place{};
  char* stack = nullptr;
  bool has_begun = false, has_ended = false;
  std::vector<std::vector<Copy>> groups = {{}};
};

inline constexpr std::size_t stack_bytes = std::size_t{1} << 18;

struct Block {
  std::vector<unsigned char> memory;
  std::vector<Thread> threads;
  std::vector<Party> warps;
  Party all;
  ucontext_t unused{};
  Place scheduler{};
  int current = 0, x = 0, y = 0, blocks_x = 1;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;

  Thread& thread() { return threads[current]; }
};

/// What a device does not do: it stops a test.
[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated kernel: %s\n", what);
  std::abort();
}

inline Block*& block() {
  static thread_local Block* current = nullptr;
  return current;
}

[[noreturn]] inline void go_on(Place& place) { __builtin_longjmp(place.of_builtin, 1); }

__attribute__((noinline)) inline void yield() {
  Block& here = *block();
  if (__builtin_setjmp(here.thread().place.of_builtin) == 0) go_on(here.scheduler);
}

/// Runs the current thread until it yields or ends.
__attribute__((noinline)) inline void run_current() {
  Block& here = *block();
  if (__builtin_setjmp(here.scheduler.of_builtin) != 0) return;
  if (here.thread().has_begun) go_on(here.thread().place);
  here.thread().has_begun = true;
  swapcontext(&here.unused, &here.thread().beginning);
}

inline void meet(Party& party) {
  const std::uint64_t before = party.meetings;
  if (++party.arrived == party.size) {
    party.arrived = 0;
    ++party.meetings;
  }
  while (party.meetings == before) yield();
}

/// Passes a value to the others of a party, and returns what work(passed) makes of all values.
template <class T, class Work>
auto exchange(Party& party, int member, const T& value, const Work& work) {
  auto& passed = party.passed[party.meetings % 2];
  static_assert(sizeof(T) <= sizeof(passed[0]));
  std::memcpy(&passed[member], &value, sizeof(T));
  meet(party);
  return work([&](int other) {
    T found;
    std::memcpy(&found, &passed[other], sizeof(T));
    return found;
  });
}

inline void thread_body() {
  Block& here = *block();
  here.body(here.argument);
  here.thread().has_ended = true;
  go_on(here.scheduler);
}

/// Runs all threads of a block to their ends. Between two exchanges each of a warp takes its turn.
inline void run(Block& here, std::mt19937& random) {
  block() = &here;
  for (Thread& thread : here.threads) {
    getcontext(&thread.beginning);
    thread.beginning.uc_stack.ss_sp = thread.stack;
    thread.beginning.uc_stack.ss_size = stack_bytes;
    makecontext(&thread.beginning, thread_body, 0);
  }
  // A warp runs ahead of the others for as long as it can or as drawn.
  std::vector<std::vector<int>> warps(here.warps.size());
  for (int i = 0; i < static_cast<int>(here.threads.size()); ++i) warps[i / 32].push_back(i);
  while (!warps.empty()) {
    const std::size_t chosen = random() % warps.size();
    std::vector<int>& own = warps[chosen];
    for (int turns = 1 << random() % 8; turns > 0 && !own.empty(); --turns) {
      std::shuffle(own.begin(), own.end(), random);
      const std::uint64_t before = here.warps[own.front() / 32].meetings;
      for (const int next : own) {
        here.current = next;
        run_current();
      }
      const auto has_ended = [&](int i) { return here.threads[i].has_ended; };
      own.erase(std::remove_if(own.begin(), own.end(), has_ended), own.end());
      if (!own.empty() && here.warps[own.front() / 32].meetings == before) break;
    }
    if (own.empty()) warps.erase(warps.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
  block() = nullptr;
}

struct Shape {
  int blocks_x, blocks_y, threads, bytes;
};

/// Runs kernel() for each thread of each block. Threads take turns in a drawn order.
template <class Kernel>
void launch(const Shape& shape, Kernel kernel) {
  std::mt19937 random(1);
  const std::unique_ptr<char[]> stacks(new char[shape.threads * stack_bytes]);
  for (int i = 0; i < shape.blocks_x * shape.blocks_y; ++i) {
    Block here;
    here.memory.assign(shape.bytes + 16, 0xff);  // NaN: memory that nothing wrote shows
    here.threads.resize(shape.threads);
    for (int t = 0; t < shape.threads; ++t) here.threads[t].stack = &stacks[t * stack_bytes];
    here.all.set_size(shape.threads);
    here.warps.resize(shape.threads / 32);
    for (Party& warp : here.warps) warp.set_size(32);
    here.x = i % shape.blocks_x;
    here.y = i / shape.blocks_x;
    here.blocks_x = shape.blocks_x;
    here.body = [](void* argument) { (*static_cast<Kernel*>(argument))(); };
    here.argument = &kernel;
    run(here, random);
  }
}

inline Party& warp() { return block()->warps[block()->current / 32]; }

template <class Value>
float value_of(std::uint32_t pair, int which) {
  Value value;
  value.bits = static_cast<std::uint16_t>(pair >> (16 * which));
  return static_cast<float>(value);
}

}  // namespace kvzap::base::cuda::emulated

namespace kvzap::base::cuda {

inline int thread_of_block() { return emulated::block()->current; }
inline int lane_of_warp() { return thread_of_block() % 32; }
inline int warp_of_block() { return thread_of_block() / 32; }
inline int block_x() { return emulated::block()->x; }
inline int block_y() { return emulated::block()->y; }
inline int thread_read_anew() { return thread_of_block(); }
inline int block_y_read_anew() { return block_y(); }
inline int blocks_x() { return emulated::block()->blocks_x; }
inline unsigned char* block_memory() {
  unsigned char* const all = emulated::block()->memory.data();
  return all + (16 - reinterpret_cast<std::uintptr_t>(all) % 16) % 16;
}
inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(static_cast<const unsigned char*>(pointer) - block_memory());
}

inline void wait_for_warp() { emulated::meet(emulated::warp()); }
inline void wait_for_block() { emulated::meet(emulated::block()->all); }
inline bool any_of_block(bool x) {
  emulated::Party& all = emulated::block()->all;
  return emulated::exchange(all, thread_of_block(), x, [&](const auto& of) {
    bool any = false;
    for (int i = 0; i < all.size; ++i) any = any || of(i);
    return any;
  });
}
inline bool any_of_warp(bool x) {
  return emulated::exchange(emulated::warp(), lane_of_warp(), x, [](const auto& of) {
    bool any = false;
    for (int i = 0; i < 32; ++i) any = any || of(i);
    return any;
  });
}
inline bool all_of_warp(bool x) { return !any_of_warp(!x); }
template <class T>
T of_lane(T value, int lane) {
  return emulated::exchange(emulated::warp(), lane_of_warp(), value,
                            [&](const auto& of) { return of(lane % 32); });
}
inline void set_bits(unsigned* word, unsigned bits) { *word |= bits; }

inline void copy16(std::uint32_t target, const void* source, bool exists) {
  if (target % 16 != 0 || reinterpret_cast<std::uintptr_t>(source) % 16 != 0) {
    emulated::fail("a copy of 16 bytes is not aligned");
  }
  emulated::block()->thread().groups.back().push_back({target, source, exists});
}
inline void commit() { emulated::block()->thread().groups.emplace_back(); }
template <int left>
void wait() {
  auto& groups = emulated::block()->thread().groups;  // the last one is not complete
  while (groups.size() > left + 1) {
    for (const emulated::Copy& copy : groups.front()) {
      unsigned char* const target = block_memory() + copy.target;
      if (copy.exists) {
        std::memcpy(target, copy.source, 16);
      } else {
        std::memset(target, 0, 16);
      }
    }
    groups.erase(groups.begin());
  }
}

template <bool transposed>
void load_matrices(std::uint32_t (&target)[4], std::uint32_t address) {
  if (address % 16 != 0) emulated::fail("a row of a matrix is not aligned");
  const int lane = lane_of_warp();
  const auto loaded = emulated::exchange(emulated::warp(), lane, address, [&](const auto& of) {
    std::array<std::uint32_t, 4> found{};
    const auto element = [&](int matrix, int row, int column) {
      std::uint16_t bits;
      std::memcpy(&bits, block_memory() + of(8 * matrix + row) + 2 * column, sizeof(bits));
      return std::uint32_t{bits};
    };
    const int first = 2 * (lane % 4), own = lane / 4;
    for (int i = 0; i < 4; ++i) {
      found[i] = transposed ? element(i, first, own) | element(i, first + 1, own) << 16
                            : element(i, own, first) | element(i, own, first + 1) << 16;
    }
    return found;
  });
  for (int i = 0; i < 4; ++i) target[i] = loaded[i];
}

template <class Value>
void multiply(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  struct Operands {
    float a[8], b[4];
  };
  Operands own{};
  for (int i = 0; i < 8; ++i) own.a[i] = emulated::value_of<Value>(a[i / 2], i % 2);
  for (int i = 0; i < 4; ++i) own.b[i] = emulated::value_of<Value>(i < 2 ? b0 : b1, i % 2);
  const int lane = lane_of_warp();
  const auto more = emulated::exchange(emulated::warp(), lane, own, [&](const auto& of) {
    std::array<float, 4> found{};
    for (int quarter = 0; quarter < 4; ++quarter) {
      const Operands left = of(lane / 4 * 4 + quarter);
      for (int i = 0; i < 4; ++i) {
        const Operands right = of((2 * (lane % 4) + i % 2) * 4 + quarter);
        for (int k = 0; k < 4; ++k) {
          found[i] += left.a[k / 2 * 4 + i / 2 * 2 + k % 2] * right.b[k];
        }
      }
    }
    return found;
  });
  for (int i = 0; i < 4; ++i) sums[i] += more[i];
}

template <class Value>
void multiply_first(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                    std::uint32_t b1) {
  for (float& sum : sums) sum = 0;
  multiply<Value>(sums, a, b0, b1);
}

template <class Value>
std::uint32_t rounded_pair(float lower, float upper) {
  return std::uint32_t{Value(lower).bits} | std::uint32_t{Value(upper).bits} << 16;
}
template <class Value>
FloatPair floats_of(std::uint32_t pair) {
  return {emulated::value_of<Value>(pair, 0), emulated::value_of<Value>(pair, 1)};
}
template <class Value>
std::uint32_t difference_of_pairs(std::uint32_t a, std::uint32_t b) {
  const FloatPair left = floats_of<Value>(a), right = floats_of<Value>(b);
  return rounded_pair<Value>(left.lower - right.lower, left.upper - right.upper);
}
inline float exp2_approximate(float x) { return std::exp2(x); }

}  // namespace kvzap::base::cuda
