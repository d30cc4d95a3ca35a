#include "linalg/host/onednn.hpp"

#if KVZAP_HAVE_ONEDNN

#include <fmt/format.h>

#include <oneapi/dnnl/dnnl_debug.h>
#include <algorithm>
#include <cstdlib>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/address_space.hpp"
#include "base/host_threads.hpp"
#include "base/lru_cache.hpp"

namespace kvzap::linalg::onednn {
namespace {

using dnnl::memory;

// Generated code and buffers of one primitive or gemm. oneDNN does not check whether it gets the
// memory for generated code, and crashes without it.
constexpr std::size_t most_bytes_of_code = std::size_t{32} << 20;

/// Throws Error if oneDNN would end the process.
void expect_room() {
  base::expect_address_space(most_bytes_of_code, "oneDNN");
  if (base::can_set_host_threads()) base::expect_threads(base::host_threads());
}

memory::data_type data_type(DType dtype) {
  if (dtype == DType::f32) return memory::data_type::f32;
  return dtype == DType::f16 ? memory::data_type::f16 : memory::data_type::bf16;
}

// The order of LinearWeights in oneDNN's terms. f16 has the order of bf16, which tiles need.
memory::format_tag packed_order(DType dtype) {
  return dtype == DType::f32 ? memory::format_tag::BA16a64b : memory::format_tag::BA16a64b2a;
}

// The key of a plan.
using Key = std::tuple<DType, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                       std::int64_t, bool>;

struct Primitive {
  memory::desc x, weights, bias, y;
  dnnl::matmul matmul;
  // False for oneDNN's plain loops, which are a thousand times as slow. See has_fast_product.
  bool is_fast = false;
};

// The plan of a product: a primitive. Rows of x and y may be contiguous in the primitive even if
// those of the product are not.
struct Plan {
  Primitive primitive;
  bool copies_x = false, copies_y = false;
};

// The number of primitives that oneDNN keeps by default.
constexpr int usual_primitives = 1024;

/// Limits the primitives that oneDNN keeps to the number of plans, for the whole process. A number
/// that the user or the program has chosen stays.
void bound_primitives() {
  for (const char* name : {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"}) {
    if (std::getenv(name)) return;
  }
  if (dnnl::get_primitive_cache_capacity() != usual_primitives) return;
  dnnl::set_primitive_cache_capacity(static_cast<int>(max_plans));
}

// Never destroyed, because oneDNN's own globals may be destroyed earlier.
struct Library {
  Library() { bound_primitives(); }

  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  base::LruCache<Key, Plan> plans{static_cast<std::size_t>(max_plans)};
  std::int64_t look_ups = 0;
  std::vector<std::byte> compact_x;
  std::vector<float> compact_y;
};

Library& library() {
  static Library& library = *new Library;
  return library;
}

Primitive make_primitive(const Product& p) {
  expect_room();
  const memory::data_type type = data_type(p.dtype);
  Primitive primitive;
  primitive.x = memory::desc({p.m, p.k}, type, memory::dims{p.x_stride, 1});
  primitive.weights = p.weights_stride == 0
                          ? memory::desc({p.k, p.n}, type, packed_order(p.dtype))
                          : memory::desc({p.k, p.n}, type, memory::dims{1, p.weights_stride});
  primitive.y = memory::desc({p.m, p.n}, memory::data_type::f32, memory::dims{p.y_stride, 1});
  if (p.bias) {
    primitive.bias = memory::desc({1, p.n}, memory::data_type::f32, memory::format_tag::ab);
  }
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::matmul::primitive_desc description =
      p.bias ? dnnl::matmul::primitive_desc(library().engine, primitive.x, primitive.weights,
                                            primitive.bias, primitive.y)
             : dnnl::matmul::primitive_desc(library().engine, primitive.x, primitive.weights,
                                            primitive.y);
#else
  const dnnl::matmul::desc operation =
      p.bias ? dnnl::matmul::desc(primitive.x, primitive.weights, primitive.bias, primitive.y)
             : dnnl::matmul::desc(primitive.x, primitive.weights, primitive.y);
  const dnnl::matmul::primitive_desc description(operation, library().engine);
#endif
  primitive.matmul = dnnl::matmul(description);
  const std::string_view kernel = description.impl_info_str();
  primitive.is_fast = p.dtype == DType::f16 ? kernel.find("amx") != std::string_view::npos
                                            : kernel.rfind("ref", 0) != 0;
  return primitive;
}

void execute(const Primitive& primitive, const Product& p) {
  const auto operand = [](const memory::desc& desc, const void* data) {
    return memory(desc, library().engine, const_cast<void*>(data));
  };
  std::unordered_map<int, memory> arguments = {
      {DNNL_ARG_SRC, operand(primitive.x, p.x)},
      {DNNL_ARG_WEIGHTS, operand(primitive.weights, p.weights)},
      {DNNL_ARG_DST, operand(primitive.y, p.y)}};
  if (p.bias) arguments.emplace(DNNL_ARG_BIAS, operand(primitive.bias, p.bias));
  primitive.matmul.execute(library().stream, arguments);
  library().stream.wait();
}

/// Returns a plan with a fast kernel, if one exists: for `p` as it is, or with contiguous rows of
/// y, or of x and y. (oneDNN 2.6 has fast kernels for packed weights only with contiguous rows of
/// y.)
Plan make_plan(const Product& p) {
  Product compact = p;
  compact.y_stride = p.n;
  // oneDNN 3.7 takes the rows of a y of one column for contiguous.
  const bool is_spaced_column = p.n == 1 && p.y_stride != 1;
  Plan as_it_is{make_primitive(is_spaced_column ? compact : p), false, is_spaced_column};
  if (as_it_is.primitive.is_fast) return as_it_is;
  for (const std::int64_t x_stride : {p.x_stride, p.k}) {
    compact.x_stride = x_stride;
    Plan plan{make_primitive(compact), x_stride != p.x_stride, compact.y_stride != p.y_stride};
    if (plan.primitive.is_fast) return plan;
  }
  return as_it_is;
}

/// Returns the plan, valid until the next call. Making one generates code, so plans are kept.
const Plan& plan_of(const Product& p) {
  const Key key{p.dtype,          p.m, p.n, p.k, p.x_stride, p.weights_stride, p.y_stride,
                p.bias != nullptr};
  ++library().look_ups;
  return library().plans.get(key, [&] { return make_plan(p); });
}

/// Only grows: resizing to each count would clear elements again and again.
template <class Element>
Element* reserve(std::vector<Element>& buffer, std::int64_t count) {
  if (static_cast<std::int64_t>(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

void multiply_by(const Plan& plan, const Product& p) {
  Product operands = p;
  if (plan.copies_x) {
    const auto size = static_cast<std::int64_t>(size_of(p.dtype));
    const auto* const source = static_cast<const std::byte*>(p.x);
    std::byte* const x = reserve(library().compact_x, p.m * p.k * size);
    for (std::int64_t i = 0; i < p.m; ++i) {
      std::copy_n(source + i * p.x_stride * size, p.k * size, x + i * p.k * size);
    }
    operands.x = x;
  }
  if (plan.copies_y) operands.y = reserve(library().compact_y, p.m * p.n);
  execute(plan.primitive, operands);
  for (std::int64_t i = 0; plan.copies_y && i < p.m; ++i) {
    std::copy_n(operands.y + i * p.n, p.n, p.y + i * p.y_stride);
  }
}

}  // namespace

bool is_available() { return true; }

bool has_fast_product(const Product& p) {
  try {
    return plan_of(p).primitive.is_fast;
  } catch (const dnnl::error&) {
    return false;
  }
}

bool has_fast_products(DType dtype, bool packed) {
  static std::map<std::pair<DType, bool>, bool> answers;
  const auto [answer, is_first] = answers.try_emplace({dtype, packed});
  if (is_first) {
    Product product{};
    product.dtype = dtype;
    product.m = 48;
    product.n = 128;
    product.k = 96;
    product.x_stride = product.k;
    product.weights_stride = packed ? 0 : product.k;
    product.y_stride = product.n;
    answer->second = has_fast_product(product);
  }
  return answer->second;
}

CacheUse cache_use() {
  return {static_cast<std::int64_t>(library().plans.size()), library().look_ups,
          dnnl::get_primitive_cache_capacity()};
}

const char* version() {
  static const std::string text = [] {
    const dnnl_version_t* v = dnnl_version();
    return fmt::format("{}.{}.{}", v->major, v->minor, v->patch);
  }();
  return text.c_str();
}

void multiply(const Product& p) {
  try {
    multiply_by(plan_of(p), p);
  } catch (const dnnl::error& error) {
    throw Error(fmt::format("oneDNN: a product of ({}, {}) by ({}, {}) failed: {}", p.m, p.k, p.n,
                            p.k, error.what()));
  }
}

void multiply(const Gemm& g) {
  expect_room();
  const dnnl_status_t status =
      dnnl_sgemm(g.a_transposed ? 'T' : 'N', g.b_transposed ? 'T' : 'N', g.m, g.n, g.k, g.alpha,
                 g.a, g.a_stride, g.b, g.b_stride, g.beta, g.c, g.c_stride);
  if (status == dnnl_success) return;
  throw Error(fmt::format("oneDNN: a gemm of ({}, {}) by ({}, {}) failed: {}", g.m, g.k, g.k, g.n,
                          dnnl_status2str(status)));
}

}  // namespace kvzap::linalg::onednn

#else

namespace kvzap::linalg::onednn {

bool is_available() { return false; }
const char* version() { return ""; }
CacheUse cache_use() { return {0, 0, 0}; }
void multiply(const Product&) { throw Error("this build has no oneDNN"); }
void multiply(const Gemm&) { throw Error("this build has no oneDNN"); }
bool has_fast_product(const Product&) { return false; }
bool has_fast_products(DType, bool) { return false; }
}  // namespace kvzap::linalg::onednn

#endif
