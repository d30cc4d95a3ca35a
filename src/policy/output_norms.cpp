#include "policy/output_norms.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/scratch.hpp"
#include "linalg/host/blas_threads.hpp"
#include "policy/row_math.hpp"

extern "C" {
// LAPACK: QR of a general matrix.
// NOLINTNEXTLINE(readability-identifier-naming): a Fortran name
void dgeqrf_(const int* m, const int* n, double* a, const int* lda, double* tau, double* work,
             const int* lwork, int* info);
}

namespace kvzap::policy {
namespace {

using linalg::ConstMatrix;
using linalg::Matrix;
using Range = PolicyRange;

// Rows of values that are multiplied at a time.
constexpr std::int64_t norms_tile_rows = 512;

// r (min(columns, length), columns) = R of the QR decomposition of the transpose of a (columns,
// length). Its columns are stored one after the other, as in LAPACK. Overwrites `a`.
void triangular_factor(std::vector<double>& a, std::int64_t columns, std::int64_t length,
                       std::vector<double>& work, float* r) {
  linalg::expect_room_for_blas();
  const int m = static_cast<int>(length), n = static_cast<int>(columns);
  const std::int64_t rank = std::min(columns, length);
  std::vector<double> reflections(rank);
  int info = 0;
  double size = 0;
  int ask = -1;
  dgeqrf_(&m, &n, a.data(), &m, reflections.data(), &size, &ask, &info);
  work.resize(std::max(work.size(), static_cast<std::size_t>(size)));
  ask = static_cast<int>(work.size());
  dgeqrf_(&m, &n, a.data(), &m, reflections.data(), work.data(), &ask, &info);
  if (info != 0) throw Error(fmt::format("LAPACK's dgeqrf refuses its argument {}", -info));
  for (std::int64_t i = 0; i < rank; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      r[i * columns + j] = j < i ? 0.0f : static_cast<float>(a[j * length + i]);
    }
  }
}

// norms(member, first + row) = norm of products(row, member's part).
void find_norms(const ExecutionSpace& exec, const Matrix& products, std::int64_t first,
                const Matrix& norms) {
  const auto group = static_cast<std::int64_t>(norms.extent(0));
  const std::int64_t columns = static_cast<std::int64_t>(products.extent(1)) / group;
  Kokkos::parallel_for(
      "kvzap::output_norms::norms",
      Range(exec, 0, static_cast<std::int64_t>(products.extent(0)) * group),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = i / group;
        const std::int64_t member = i % group;
        norms(member, first + row) = norm(&products(row, member * columns), columns);
      });
}

}  // namespace

const OutputNorms::Factor& OutputNorms::factor(PolicyLayer& layer, int head) {
  const PolicyLayer::Extents& extents = layer.extents();
  m_factors.resize(std::max<std::size_t>(m_factors.size(), layer.layer() + 1));
  auto& of_layer = m_factors[layer.layer()];
  of_layer.resize(layer.heads());
  Factor& result = of_layer.at(head);
  if (result.size() > 0) return result;
  const std::int64_t dim = extents.head_dim;
  const std::int64_t hidden = extents.hidden_size;
  const std::int64_t rank = std::min(dim, hidden);
  Factor made("kvzap::output_norms::factor", extents.group * rank, dim);
  const auto host = Kokkos::create_mirror_view(made);
  std::vector<double> columns(dim * hidden), work;
  for (int member = 0; member < extents.group; ++member) {
    const PolicyLayer::RowsView weights = layer.output_weights(head * extents.group + member);
    const auto of_member =
        Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), (layer.exec().fence(), weights));
    for (std::int64_t d = 0; d < dim; ++d) {
      for (std::int64_t i = 0; i < hidden; ++i) columns[d * hidden + i] = of_member(d, i);
    }
    triangular_factor(columns, dim, hidden, work, &host(member * rank, 0));
  }
  Kokkos::deep_copy(made, host);
  result = made;
  return result;
}

void OutputNorms::operator()(PolicyLayer& layer, int head, std::int64_t begin, std::int64_t count,
                             const linalg::Matrix& norms) {
  if (count == 0) return;
  const Factor& of_group = factor(layer, head);
  const auto columns = static_cast<std::int64_t>(of_group.extent(0));
  base::reserve_scratch(m_products, std::min(count, norms_tile_rows) * columns,
                        "kvzap::output_norms::products");
  const PolicyLayer::RowsView values = layer.values(head, begin, count);
  for (std::int64_t first = 0; first < count; first += norms_tile_rows) {
    const std::int64_t rows = std::min(norms_tile_rows, count - first);
    const ConstMatrix tile =
        Kokkos::subview(values, std::make_pair(first, first + rows), Kokkos::ALL);
    const Matrix products(m_products.data(), rows, columns);
    linalg::multiply_nt(layer.exec(), 1, tile, of_group, 0, products);
    find_norms(layer.exec(), products, first, norms);
  }
}

}  // namespace kvzap::policy
