#include "linalg/device/chosen_products.hpp"

#include <kvzap/core/array_view.hpp>
#include <type_traits>

#include "base/launch.hpp"
#include "base/row_vector.hpp"
#include "base/team.hpp"

namespace kvzap::linalg {
namespace {

// Threads of a team, each with an output, and lanes that share its inputs.
constexpr base::TeamShape shape{8, 32};

/// A team computes a few outputs of a row.
template <class Value>
struct ChosenProducts {
  Kokkos::View<const ChosenMaps::Place*, MemorySpace> places;
  Kokkos::View<const std::int64_t*, MemorySpace> chosen;
  const float* x;
  float* y;
  std::int64_t x_stride, y_stride, share, inputs, outputs, blocks;

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    constexpr int width = base::RowVector<Value>::width;
    const std::int64_t row = team.league_rank() / blocks;
    const std::int64_t first = team.league_rank() % blocks * team.team_size();
    const ChosenMaps::Place place = places(chosen(row));
    const float* const own_x = x + row / share * x_stride;
    const std::int64_t vectors = inputs / width;
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, team.team_size()), [&](int t) {
      const std::int64_t n = first + t;
      if (n >= outputs) return;
      const auto* const weights = static_cast<const Value*>(place.weights) + n * inputs;
      const bool is_whole = inputs % width == 0 && base::is_vector_aligned(weights);
      float sum = 0;
      Kokkos::parallel_reduce(
          Kokkos::ThreadVectorRange(team, is_whole ? vectors : 0),
          [&](std::int64_t v, float& partial) {
            float values[width];
            base::RowVector<Value>::load(weights + v * width, values);
            for (int e = 0; e < width; ++e) partial += values[e] * rounded(own_x[v * width + e]);
          },
          sum);
      float rest = 0;
      Kokkos::parallel_reduce(
          Kokkos::ThreadVectorRange(team, is_whole ? 0 : inputs),
          [&](std::int64_t k, float& partial) {
            partial += static_cast<float>(weights[k]) * rounded(own_x[k]);
          },
          rest);
      Kokkos::single(Kokkos::PerThread(team), [&] {
        y[row * y_stride + n] = sum + rest + (place.bias ? place.bias[n] : 0.0f);
      });
    });
  }

  KOKKOS_INLINE_FUNCTION static float rounded(float value) {
    return std::is_same_v<Value, bfloat16> ? static_cast<float>(bfloat16(value)) : value;
  }
};

}  // namespace

ChosenMaps::ChosenMaps(const std::vector<const LinearWeights*>& maps,
                       const std::vector<ConstVector>& biases)
    : m_dtype(maps.front()->dtype()),
      m_outputs(maps.front()->outputs()),
      m_inputs(maps.front()->inputs()),
      m_places("kvzap::linear::chosen_maps", maps.size()) {
  const auto host = Kokkos::create_mirror_view(m_places);
  for (std::size_t i = 0; i < maps.size(); ++i) {
    host(i) = {maps[i]->memory().data(), biases[i].extent(0) > 0 ? biases[i].data() : nullptr};
  }
  Kokkos::deep_copy(m_places, host);
}

void ChosenMaps::operator()(const ExecutionSpace& exec, const ConstMatrix& x, std::int64_t share,
                            const Kokkos::View<const std::int64_t*, MemorySpace>& chosen,
                            const Matrix& y) const {
  const auto rows = static_cast<std::int64_t>(y.extent(0));
  if (rows == 0 || m_outputs == 0) return;
  with_value_type(m_dtype, [&](auto zero) {
    ChosenProducts<decltype(zero)> kernel{m_places,
                                          chosen,
                                          x.data(),
                                          y.data(),
                                          static_cast<std::int64_t>(x.stride(0)),
                                          static_cast<std::int64_t>(y.stride(0)),
                                          share,
                                          m_inputs,
                                          m_outputs,
                                          1};
    static_assert(sizeof(kernel) <= base::most_arguments, "Kokkos would wait");
    const auto bytes = [](int /*threads*/) { return std::size_t{0}; };
    const int threads = base::team_policy(exec, 1, shape, kernel, bytes).team_size();
    kernel.blocks = (m_outputs + threads - 1) / threads;
    base::parallel_for("kvzap::linear::chosen",
                       base::team_policy(exec, rows * kernel.blocks, shape, kernel, bytes), kernel);
  });
}

}  // namespace kvzap::linalg
