// Speed of attention. Decode: bytes of keys and values read per second. Prefill: floating-point
// operations per second, 4 head_dim for each pair of a query and a key that it sees (2 head_dim for
// attention mass). Every rank has a cache of its own.
#include <algorithm>
#include <cstdint>
#include <kvzap/core/attention.hpp>
#include <kvzap/core/attention_mass.hpp>
#include <kvzap/core/quantised_rows.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"
#include "common.hpp"

namespace kvzap::perf {
namespace {

/// Random numbers in [-1, 1), drawn once and repeated with a period that no row length divides.
template <class View>
void fill(const View& view) {
  using Value = typename View::non_const_value_type;
  const auto host = Kokkos::create_mirror_view(view);
  std::mt19937 random(1);
  std::vector<Value> pattern(10007);
  for (Value& x : pattern) x = Value(static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f);
  const std::size_t size = host.size();
  for (std::size_t i = 0; i < size; i += pattern.size()) {
    std::copy_n(pattern.begin(), std::min(pattern.size(), size - i), host.data() + i);
  }
  Kokkos::deep_copy(view, host);
}

/// How the pages of a head lie in memory.
enum class Placement {
  in_order,  // one after the other, as a prefill takes them from the pool
  scattered  // anywhere, as after many allocations and releases: the worst case
};

/// Random codes, repeated with the same period, and scales near 1.
void fill(const Kokkos::View<std::uint8_t*, Kokkos::HostSpace>& pages, const QuantisedPage& page) {
  std::mt19937 random(1);
  std::vector<std::uint8_t> pattern(10007);
  for (std::uint8_t& code : pattern) code = static_cast<std::uint8_t>(random() >> 9);
  for (std::size_t i = 0; i < pages.size(); i += pattern.size()) {
    std::copy_n(pattern.begin(), std::min(pattern.size(), pages.size() - i), pages.data() + i);
  }
  for (std::size_t at = 0; at < pages.size(); at += static_cast<std::size_t>(page.bytes())) {
    for (const bool values : {false, true}) {
      const QuantisedRows rows = page.at(reinterpret_cast<std::uintptr_t>(&pages(at)), values);
      auto* const scales = const_cast<bfloat16*>(rows.scales);
      for (int r = 0; r < page.rows; ++r) scales[r] = bfloat16(1.0f + static_cast<float>(r % 7));
    }
  }
}

/// A layer whose heads have the given numbers of retained rows, in pages of one allocation, and an
/// empty ring.
template <class Value>
struct PagedLayer {
  Kokkos::View<std::uint8_t*, MemorySpace> storage;
  kvzap::CachedLayer layer;
  std::int64_t rows = 0;

  PagedLayer(const std::vector<std::int64_t>& retained, int dim, int page_rows,
             Placement placement = Placement::in_order, const PageFormat& format = {}) {
    const int heads = static_cast<int>(retained.size());
    std::vector<std::int64_t> pages;
    for (std::int64_t n : retained) {
      rows += n;
      pages.push_back((n + page_rows - 1) / page_rows);
    }
    const std::int64_t total = std::accumulate(pages.begin(), pages.end(), std::int64_t{0});
    const QuantisedPage quantised{format, page_rows, dim};
    const std::int64_t page_size =
        format.quantised()
            ? quantised.bytes()
            : std::int64_t{2} * page_rows * dim * static_cast<std::int64_t>(sizeof(Value));
    // Uses huge pages, as the slabs of a PagePool do. Kernels may read 32 bytes behind a page.
    storage = Kokkos::View<std::uint8_t*, MemorySpace>(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "storage"), total * page_size + 32);
    if constexpr (base::runs_on_host) base::advise_huge_pages(storage.data(), storage.size());
    if (format.quantised()) {
      const Kokkos::View<std::uint8_t*, Kokkos::HostSpace> bytes("pages", total * page_size);
      fill(bytes, quantised);
      Kokkos::deep_copy(
          Kokkos::subview(storage, std::make_pair<std::int64_t>(0, total * page_size)), bytes);
    } else {
      fill(Kokkos::View<Value*, MemorySpace>(reinterpret_cast<Value*>(storage.data()),
                                             total * page_size / sizeof(Value)));
    }
    Kokkos::View<std::uintptr_t*, MemorySpace> addresses("addresses", total);
    Kokkos::View<PageId**, Kokkos::LayoutRight, MemorySpace> table(
        "table", heads, *std::max_element(pages.begin(), pages.end()));
    Kokkos::View<std::int64_t*, MemorySpace> counts("retained", heads);
    const auto host_addresses = Kokkos::create_mirror_view(addresses);
    const auto host_table = Kokkos::create_mirror_view(table);
    const auto host_counts = Kokkos::create_mirror_view(counts);
    std::vector<std::int64_t> slots(total);
    std::iota(slots.begin(), slots.end(), 0);
    if (placement == Placement::scattered) {
      std::shuffle(slots.begin(), slots.end(), std::mt19937(2));
    }
    PageId id = 0;
    for (int h = 0; h < heads; ++h) {
      host_counts(h) = retained[h];
      for (std::int64_t p = 0; p < pages[h]; ++p, ++id) {
        host_table(h, p) = id;
        host_addresses(id) =
            reinterpret_cast<std::uintptr_t>(storage.data() + slots[id] * page_size);
      }
    }
    Kokkos::deep_copy(addresses, host_addresses);
    Kokkos::deep_copy(table, host_table);
    Kokkos::deep_copy(counts, host_counts);
    layer.addresses = addresses;
    layer.page_table = table;
    layer.retained = counts;
    const Kokkos::View<std::int64_t*, Kokkos::HostSpace> bounds("bounds", heads);
    std::copy(retained.begin(), retained.end(), bounds.data());
    layer.bounds = bounds;
    layer.ring = Kokkos::View<char**, Kokkos::LayoutRight, MemorySpace>("ring", heads,
                                                                        2 * dim * sizeof(Value));
    layer.dtype = DTypeOf<Value>::value;
    layer.heads = heads;
    layer.page_rows = page_rows;
    layer.head_dim = dim;
    layer.format = format;
  }
};

/// Returns (a, b, c), row-major, as the strided views that attention takes.
template <class Value>
Kokkos::View<Value***, Kokkos::LayoutStride, MemorySpace> array(std::int64_t a, std::int64_t b,
                                                                std::int64_t c) {
  const Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace> view("array", a, b, c);
  fill(view);
  return view;
}

constexpr int decode_heads = 8;
constexpr std::int64_t decode_bytes = std::int64_t{288} << 20;

enum class Lengths { uniform, skewed };

/// `bytes`: bytes that each rank reads.
void report_decode(benchmark::State& state, double bytes, const std::function<void()>& work) {
  work();
  const Yardstick limit(Limit::read);
  const double seconds = time_iterations(state, work);
  report_bytes(state, seconds, bytes * world().size(), limit);
}

/// One query token over decode_heads KV heads whose rows take decode_bytes in total.
template <class Value>
void decode(benchmark::State& state, int dim, int group, int page_rows, Lengths lengths,
            Placement placement) {
  const std::int64_t row_bytes = std::int64_t{2} * dim * sizeof(Value);
  const std::int64_t rows = decode_bytes / row_bytes / decode_heads;
  std::vector<std::int64_t> retained(decode_heads, rows);
  if (lengths == Lengths::skewed) {
    // Half of the heads have 16 times the rows of the others. The total bytes are the same.
    for (int h = 0; h < decode_heads; ++h) retained[h] = (h % 2 ? 2 : 32) * rows / 17;
  }
  if (page_rows == 0) page_rows = static_cast<int>(rows);  // a page per head
  const PagedLayer<Value> cache(retained, dim, page_rows, placement);
  const auto queries = array<float>(1, decode_heads * group, dim);
  const auto new_rows = array<Value>(1, decode_heads, dim);
  const auto output = array<float>(1, decode_heads * group, dim);
  Attention attention(DTypeOf<Value>::value);
  const ExecutionSpace exec;
  report_decode(state, static_cast<double>(cache.rows * row_bytes),
                [&] { attention(exec, cache.layer, queries, new_rows, new_rows, output); });
}

/// One query token over quantised rows, which take as many bytes.
void decode_quantised(benchmark::State& state, const PageFormat& format, int dim, int group) {
  constexpr int page_rows = 64;
  const std::int64_t page_bytes = QuantisedPage{format, page_rows, dim}.bytes();
  const std::int64_t pages = decode_bytes / page_bytes / decode_heads;
  const PagedLayer<bfloat16> cache(std::vector<std::int64_t>(decode_heads, pages * page_rows), dim,
                                   page_rows, Placement::in_order, format);
  const auto queries = array<float>(1, decode_heads * group, dim);
  const auto new_rows = array<bfloat16>(1, decode_heads, dim);
  const auto output = array<float>(1, decode_heads * group, dim);
  Attention attention(DType::bf16);
  const ExecutionSpace exec;
  report_decode(state, static_cast<double>(decode_heads * pages * page_bytes),
                [&] { attention(exec, cache.layer, queries, new_rows, new_rows, output); });
}

/// B sequences of equal length in one step.
template <class Value>
void decode_batch(benchmark::State& state, int sequences) {
  constexpr int dim = 128, group = 4;
  const std::int64_t row_bytes = std::int64_t{2} * dim * sizeof(Value);
  const std::int64_t rows = decode_bytes / row_bytes / decode_heads / sequences;
  std::vector<PagedLayer<Value>> caches;
  std::vector<kvzap::CachedLayer> layers;
  for (int b = 0; b < sequences; ++b) {
    caches.emplace_back(std::vector<std::int64_t>(decode_heads, rows), dim, 64);
    layers.push_back(caches.back().layer);
  }
  const auto queries = array<float>(sequences, decode_heads * group, dim);
  const auto new_rows = array<Value>(sequences, decode_heads, dim);
  const auto output = array<float>(sequences, decode_heads * group, dim);
  Attention attention(DTypeOf<Value>::value);
  const ExecutionSpace exec;
  report_decode(state, static_cast<double>(sequences * decode_heads * rows * row_bytes),
                [&] { attention.decode(exec, layers, queries, new_rows, new_rows, output); });
}

/// `tokens` queries over a cache of `cached` rows per head and, causally, over each other.
template <class Value>
void prefill(benchmark::State& state, int group, std::int64_t tokens, std::int64_t cached) {
  constexpr int dim = 128, kv_heads = 2;
  const PagedLayer<Value> cache(std::vector<std::int64_t>(kv_heads, cached), dim, 64);
  const auto queries = array<float>(tokens, kv_heads * group, dim);
  const auto new_rows = array<Value>(tokens, kv_heads, dim);
  const auto output = array<float>(tokens, kv_heads * group, dim);
  Attention attention(DTypeOf<Value>::value);
  const ExecutionSpace exec;
  const auto work = [&] {
    attention(exec, cache.layer, queries, new_rows, new_rows, output,
              {AttentionPath::flash_prefill});
  };
  work();
  // 16-bit floats other than bf16 are multiplied as floats.
  const Yardstick limit(std::is_same_v<Value, bfloat16> ? Limit::gemm_bf16 : Limit::gemm_f32);
  const double seconds = time_iterations(state, work);
  const double pairs = static_cast<double>(tokens) *
                       (static_cast<double>(cached) + 0.5 * (static_cast<double>(tokens) + 1));
  report_flops(state, seconds, 4.0 * dim * kv_heads * group * pairs * world().size(), limit);
}

/// The mass that `tokens` queries give a cache of `cached` rows per head and each other.
template <class Value>
void mass(benchmark::State& state, std::int64_t tokens, std::int64_t cached) {
  constexpr int dim = 128, kv_heads = 2, group = 4;
  const PagedLayer<Value> cache(std::vector<std::int64_t>(kv_heads, cached), dim, 64);
  const auto queries = array<float>(tokens, kv_heads * group, dim);
  const auto new_rows = array<Value>(tokens, kv_heads, dim);
  const auto output = array<float>(tokens, kv_heads * group, dim);
  const Kokkos::View<float**, MemorySpace> lse("lse", tokens, kv_heads * group);
  const Kokkos::View<float**, MemorySpace> result("mass", kv_heads, cached + tokens);
  Attention attention(DTypeOf<Value>::value);
  AttentionMass attention_mass(DTypeOf<Value>::value);
  const ExecutionSpace exec;
  attention(exec, cache.layer, queries, new_rows, new_rows, output,
            {AttentionPath::flash_prefill, lse});
  const AttentionSpan span{cache.layer, 0, tokens, 0, tokens};
  const auto work = [&] { attention_mass(exec, span, queries, new_rows, lse, result); };
  work();
  const Yardstick limit(std::is_same_v<Value, bfloat16> ? Limit::gemm_bf16 : Limit::gemm_f32);
  const double seconds = time_iterations(state, work);
  const double pairs = static_cast<double>(tokens) *
                       (static_cast<double>(cached) + 0.5 * (static_cast<double>(tokens) + 1));
  report_flops(state, seconds, 2.0 * dim * kv_heads * group * pairs * world().size(), limit);
}

template <class Value>
void add_decode(const std::string& type, int repetitions) {
  constexpr std::int64_t iterations = 12;
  for (int dim : {64, 80, 128, 256}) {
    for (int group : {1, 2, 4, 8, 16}) {
      if (dim != 128 && group != 4) continue;
      const std::string name =
          "decode/" + type + "/dim:" + std::to_string(dim) + "/group:" + std::to_string(group);
      const auto with = [=](int page_rows, Lengths lengths,
                            Placement placement = Placement::in_order) {
        return [=](benchmark::State& state) {
          decode<Value>(state, dim, group, page_rows, lengths, placement);
        };
      };
      const auto add_case = [&](const char* suffix, const auto& body) {
        add(name + suffix, iterations, repetitions, body);
      };
      add_case("/paged", with(64, Lengths::uniform));
      if (group == 4) {
        add_case("/contiguous", with(0, Lengths::uniform));
        add_case("/skewed", with(64, Lengths::skewed));
        add_case("/scattered", with(64, Lengths::uniform, Placement::scattered));
      }
    }
  }
  for (int sequences : {4, 16}) {
    add("decode_batch/" + type + "/sequences:" + std::to_string(sequences), iterations, repetitions,
        [=](benchmark::State& state) { decode_batch<Value>(state, sequences); });
  }
}

void add_quantised_decode(int repetitions) {
  constexpr std::int64_t iterations = 12;
  for (const char* const type : {"q8", "q8,q4", "q4", "q3", "q2"}) {
    const PageFormat format = page_format_from_name(type, DType::bf16);
    for (int dim : {64, 128}) {
      for (int group : {1, 2, 3, 4, 8}) {
        add("decode/" + std::string(type) + "/dim:" + std::to_string(dim) +
                "/group:" + std::to_string(group),
            iterations, repetitions,
            [=](benchmark::State& state) { decode_quantised(state, format, dim, group); });
      }
    }
  }
}

template <class Value>
void add_prefill(const std::string& type, int repetitions) {
  for (int group : {2, 4}) {
    for (int tokens : {2048, 4096, 8192, 16384}) {
      add("prefill/" + type + "/group:" + std::to_string(group) +
              "/tokens:" + std::to_string(tokens),
          8192 / tokens + 1, repetitions,
          [=](benchmark::State& state) { prefill<Value>(state, group, tokens, 0); });
    }
  }
  add("mass/" + type + "/tokens:512/cached:8192", 4, repetitions,
      [=](benchmark::State& state) { mass<Value>(state, 512, 8192); });
  // A chunk of a sparse prefill over the retained part of 16384 rows, at three keep ratios.
  for (int percent : {100, 50, 25}) {
    add("prefill_sparse/" + type + "/keep_percent:" + std::to_string(percent), 1, repetitions,
        [=](benchmark::State& state) { prefill<Value>(state, 4, 2048, 16384 * percent / 100); });
  }
}

}  // namespace

void register_benchmarks(const Options& options) {
  const int repetitions = options.quick ? 1 : 5;
  add_decode<bfloat16>("bf16", repetitions);
  add_decode<half>("f16", repetitions);
  add_decode<float>("f32", repetitions);
  add_quantised_decode(repetitions);
  add_prefill<bfloat16>("bf16", repetitions);
  add_prefill<half>("f16", repetitions);
  add_prefill<float>("f32", repetitions);
}

}  // namespace kvzap::perf
