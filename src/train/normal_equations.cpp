#include "train/normal_equations.hpp"

#include <algorithm>
#include <type_traits>

#include "base/host_threads.hpp"
#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "linalg/host/row_kernels.hpp"
#include "train/lapack.hpp"

namespace kvzap::train {
namespace {

using NormalRange = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
using DoubleMatrix = Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace>;

// Forms z (rows, inputs + heads + 1), see NormalEquations, in float or double.
template <class Value, class Z>
void normal_rows(const ExecutionSpace& exec, const Value* hidden, std::int64_t inputs,
                 const linalg::ConstMatrix& scores, const Order& rows,
                 const linalg::ConstVector& shift, const Z& z) {
  using Number = typename Z::non_const_value_type;
  const std::int64_t count = z.extent(0), heads = scores.extent(1);
  const std::int64_t columns = inputs + heads + 1;
  if constexpr (std::is_same_v<Number, float>) {
    if (base::machine().on_host()) {
      base::host_for("kvzap::ridge::rows", count, [=](std::int64_t i) {
        float* const row = &z(i, 0);
        linalg::widen(hidden + rows(i) * inputs, row, inputs);
        subtract(row, shift.data(), inputs);
        for (std::int64_t h = 0; h < heads; ++h) {
          row[inputs + h] = scores(rows(i), h) - shift(inputs + h);
        }
        row[inputs + heads] = 1;
      });
      return;
    }
  }
  Kokkos::parallel_for(
      "kvzap::ridge::rows", NormalRange(exec, 0, count * columns), KOKKOS_LAMBDA(std::int64_t n) {
        const std::int64_t i = n / columns, c = n % columns;
        Number value = 1;
        if (c < inputs) {
          value = static_cast<Number>(static_cast<float>(hidden[rows(i) * inputs + c])) - shift(c);
        } else if (c < inputs + heads) {
          value = static_cast<Number>(scores(rows(i), c - inputs)) - shift(c);
        }
        z(i, c) = value;
      });
}

// sums += z^T z, on and above the diagonal.
void add_products(const ExecutionSpace& exec, const DoubleMatrix& z, const DoubleMatrix& sums) {
  const std::int64_t count = z.extent(0), columns = z.extent(1);
  if constexpr (base::runs_on_host) {
    if (base::machine().on_host()) {
      base::fence(exec, "kvzap::ridge: BLAS does not run on the instance");
      return add_symmetric_products(z.data(), count, columns, sums.data());
    }
  }
  Kokkos::parallel_for(
      "kvzap::ridge::products", NormalRange(exec, 0, columns * columns),
      KOKKOS_LAMBDA(std::int64_t n) {
        const std::int64_t i = n / columns, j = n % columns;
        if (j < i) return;
        double sum = 0;
        for (std::int64_t r = 0; r < count; ++r) sum += z(r, i) * z(r, j);
        sums(i, j) += sum;
      });
}

// sums (row + i, column + j) += products (i, j)
void add_tile(const ExecutionSpace& exec, const linalg::ConstMatrix& products, std::int64_t row,
              std::int64_t column, const DoubleMatrix& sums) {
  const std::int64_t count = products.extent(0), columns = products.extent(1);
  if (base::machine().on_host()) {
    base::host_for("kvzap::ridge::add", count, [=](std::int64_t i) {
      add_to_double(&products(i, 0), &sums(row + i, column), columns);
    });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::ridge::add", NormalRange(exec, 0, count * columns), KOKKOS_LAMBDA(std::int64_t n) {
        sums(row + n / columns, column + n % columns) += products(n / columns, n % columns);
      });
}

// Avoids multiples of a memory page: the columns of such a matrix share few cache sets.
std::int64_t padded_columns(std::int64_t columns) { return (columns + 15) / 16 * 16; }

}  // namespace

NormalEquations::NormalEquations(std::int64_t inputs, std::int64_t heads,
                                 const std::vector<float>& shift, bool always_double)
    : m_inputs(inputs),
      m_heads(heads),
      m_is_double(always_double || inputs <= double_inputs),
      m_shift("kvzap::ridge::shift", inputs + heads),
      m_double_z("kvzap::ridge::double_z", is_double() ? block_rows : 0, columns()),
      m_z("kvzap::ridge::z", is_double() ? 0 : block_rows, padded_columns(columns())),
      m_tile("kvzap::ridge::tile", is_double() ? 0 : tile * std::max(tile, heads + 1)),
      m_sums("kvzap::ridge::sums", columns(), columns()) {
  if constexpr (base::runs_on_host) {
    if (!is_double()) base::advise_huge_pages(m_z.data(), m_z.size() * sizeof(float));
    base::advise_huge_pages(m_sums.data(), m_sums.size() * sizeof(double));
  }
  using Host =
      Kokkos::View<const float*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  Kokkos::deep_copy(m_shift, Host(shift.data(), shift.size()));
}

void NormalEquations::add(const ExecutionSpace& exec, const ConstArrayView& hidden,
                          const linalg::ConstMatrix& scores, const Order& rows) {
  const auto total = static_cast<std::int64_t>(rows.extent(0));
  const auto form_rows = [&](const Order& part, const auto& z) {
    with_value_type(hidden.dtype, [&](auto zero) {
      normal_rows(exec, hidden.values<decltype(zero)>(), m_inputs, scores, part, m_shift, z);
    });
  };
  for (std::int64_t begin = 0; begin < total; begin += block_rows) {
    const std::int64_t count = std::min(block_rows, total - begin);
    const Order part = Kokkos::subview(rows, std::make_pair(begin, begin + count));
    if (is_double()) {
      const Sums z(m_double_z.data(), count, columns());
      form_rows(part, z);
      add_products(exec, z, m_sums);
      continue;
    }
    const linalg::Matrix z(m_z.data(), count, m_z.extent(1));
    form_rows(part, z);
    const auto columns_of = [&](std::int64_t first, std::int64_t end) {
      return linalg::Matrix(Kokkos::subview(z, Kokkos::ALL, std::make_pair(first, end)));
    };
    // The inputs are split into tiles. The last tile is narrow and has the scores and the one.
    for (std::int64_t row = 0; row < columns();) {
      const std::int64_t row_end = row < m_inputs ? std::min(row + tile, m_inputs) : columns();
      for (std::int64_t column = row; column < columns();) {
        const std::int64_t end = column < m_inputs ? std::min(column + tile, m_inputs) : columns();
        const linalg::Matrix products(m_tile.data(), row_end - row, end - column);
        linalg::multiply_large(exec, linalg::Op::transposed, columns_of(row, row_end),
                               linalg::Op::plain, columns_of(column, end), 0, products);
        add_tile(exec, products, row, column, m_sums);
        column = end;
      }
      row = row_end;
    }
  }
}

Kokkos::View<double**, Kokkos::LayoutRight, Kokkos::HostSpace> NormalEquations::sums() const {
  return Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), m_sums);
}

double NormalEquations::flops(std::int64_t rows) const {
  double products = 0;
  for (std::int64_t row = 0; row < columns();) {
    const std::int64_t end = row < m_inputs ? std::min(row + tile, m_inputs) : columns();
    products += static_cast<double>(end - row) * static_cast<double>(columns() - row);
    row = end;
  }
  return 2 * products * static_cast<double>(rows);
}

}  // namespace kvzap::train
