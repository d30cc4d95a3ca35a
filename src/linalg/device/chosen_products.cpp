#include "linalg/device/chosen_products.hpp"

#include <algorithm>
#include <kvzap/core/array_view.hpp>
#include <type_traits>

#include "base/cuda/has_tensor_cores.hpp"
#include "base/launch.hpp"
#include "base/row_vector.hpp"
#include "base/team.hpp"
#include "linalg/cuda/quantised_products.hpp"

namespace kvzap::linalg {
namespace {

// Threads of a team, each with an output, and lanes that share its inputs.
constexpr base::TeamShape shape{8, 32};

/// What both kernels read and write. A team computes a few outputs of a row.
struct ChosenRows {
  Kokkos::View<const ChosenPlace*, MemorySpace> places;
  Kokkos::View<const std::int64_t*, MemorySpace> chosen;
  const float* x;
  float* y;
  std::int64_t x_stride, y_stride, share, inputs, outputs;
  std::int64_t blocks = 1;  // of outputs
};

template <class Value>
struct ChosenProducts : ChosenRows {
  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    constexpr int width = base::RowVector<Value>::width;
    const std::int64_t row = team.league_rank() / blocks;
    const std::int64_t first = team.league_rank() % blocks * team.team_size();
    const ChosenPlace place = places(chosen(row));
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

/// The same with quantised weights: the reference of tensor_cores::multiply_chosen.
struct ChosenPanels : ChosenRows {
  quantised::Panels panels;  // of each map, but for `data`

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    const std::int64_t row = team.league_rank() / blocks;
    const std::int64_t first = team.league_rank() % blocks * team.team_size();
    const ChosenPlace place = places(chosen(row));
    quantised::Panels own = panels;
    own.data = static_cast<const std::uint8_t*>(place.weights);
    const quantised::Places columns{place.columns};
    const float* const own_x = x + row / share * x_stride;
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, team.team_size()), [&](int t) {
      const std::int64_t n = first + t;
      if (n >= outputs) return;
      float sum = 0;
      Kokkos::parallel_reduce(
          Kokkos::ThreadVectorRange(team, inputs),
          [&](std::int64_t k, float& partial) {
            partial += quantised::value_at(own, n, columns(k)) * own_x[k];
          },
          sum);
      Kokkos::single(Kokkos::PerThread(team),
                     [&] { y[row * y_stride + n] = sum + (place.bias ? place.bias[n] : 0.0f); });
    });
  }
};

/// Launches a kernel of teams whose threads have an output each.
template <class Kernel>
void launch_chosen(const ExecutionSpace& exec, std::int64_t rows, Kernel kernel) {
  static_assert(sizeof(kernel) <= base::most_arguments, "Kokkos would wait");
  const auto bytes = [](int /*threads*/) { return std::size_t{0}; };
  const int threads = base::team_policy(exec, 1, shape, kernel, bytes).team_size();
  kernel.blocks = (kernel.outputs + threads - 1) / threads;
  base::parallel_for("kvzap::linear::chosen",
                     base::team_policy(exec, rows * kernel.blocks, shape, kernel, bytes), kernel);
}

bool have_same_sections(const quantised::Matrix& one, const quantised::Matrix& other) {
  return std::equal(
      one.sections().begin(), one.sections().end(), other.sections().begin(),
      other.sections().end(), [](const quantised::Section& a, const quantised::Section& b) {
        return a.outputs == b.outputs && a.panels.inputs == b.panels.inputs &&
               a.panels.codes == b.panels.codes && a.panels.scales == b.panels.scales &&
               std::equal(std::begin(a.panels.table), std::end(a.panels.table),
                          std::begin(b.panels.table));
      });
}

}  // namespace

bool ChosenMaps::serve(const std::vector<const LinearWeights*>& maps) {
  const LinearWeights& first = *maps.front();
  return std::all_of(maps.begin(), maps.end(), [&](const LinearWeights* map) {
    if (map->is_packed() || map->dtype() != first.dtype()) return false;
    if (map->outputs() != first.outputs() || map->inputs() != first.inputs()) return false;
    if (map->quantised() == nullptr || first.quantised() == nullptr) {
      return map->quantised() == first.quantised();
    }
    return have_same_sections(*map->quantised(), *first.quantised()) &&
           (map->quantised()->is_in_order() || map->quantised()->has_floats());
  });
}

ChosenMaps::ChosenMaps(const std::vector<const LinearWeights*>& maps,
                       const std::vector<ConstVector>& biases)
    : m_dtype(maps.front()->dtype()),
      m_inputs(maps.front()->inputs()),
      m_is_quantised(maps.front()->quantised() != nullptr) {
  if (m_is_quantised) {
    for (const quantised::Section& section : maps.front()->quantised()->sections()) {
      m_sections.push_back({section.panels, section.first, section.outputs, {}});
      m_sections.back().panels.data = nullptr;
    }
    m_are_in_order = std::all_of(maps.begin(), maps.end(), [](const LinearWeights* map) {
      return map->quantised()->is_in_order();
    });
  } else {
    m_sections.push_back({{}, 0, maps.front()->outputs(), {}});
  }
  for (std::size_t s = 0; s < m_sections.size(); ++s) {
    Section& section = m_sections[s];
    section.places =
        Kokkos::View<ChosenPlace*, MemorySpace>("kvzap::linear::chosen_maps", maps.size());
    const auto host = Kokkos::create_mirror_view(section.places);
    for (std::size_t i = 0; i < maps.size(); ++i) {
      const quantised::Matrix* const panels = maps[i]->quantised();
      host(i) = {maps[i]->memory().data(),
                 biases[i].extent(0) > 0 ? biases[i].data() + section.first : nullptr, nullptr};
      if (panels == nullptr) continue;
      host(i).weights = panels->sections()[s].panels.data;
      host(i).columns = panels->places().data;
    }
    Kokkos::deep_copy(section.places, host);
  }
}

void ChosenMaps::operator()(const ExecutionSpace& exec, const ConstMatrix& x, std::int64_t share,
                            const Kokkos::View<const std::int64_t*, MemorySpace>& chosen,
                            const Matrix& y) const {
  const auto rows = static_cast<std::int64_t>(y.extent(0));
  if (rows == 0) return;
  for (const Section& section : m_sections) {
    if (section.outputs == 0) continue;
    const auto columns = std::make_pair(section.first, section.first + section.outputs);
    const Matrix own = Kokkos::subview(y, Kokkos::ALL, columns);
    if (m_is_quantised && m_are_in_order && base::cuda::has_tensor_cores() &&
        tensor_cores::multiply_chosen(
            exec, x, {section.panels, section.places.data(), chosen.data(), share}, own)) {
      continue;
    }
    const ChosenRows of_section{section.places,
                                chosen,
                                x.data(),
                                own.data(),
                                static_cast<std::int64_t>(x.stride(0)),
                                static_cast<std::int64_t>(y.stride(0)),
                                share,
                                m_inputs,
                                section.outputs};
    if (m_is_quantised) {
      launch_chosen(exec, rows, ChosenPanels{of_section, section.panels});
    } else {
      with_value_type(m_dtype, [&](auto zero) {
        launch_chosen(exec, rows, ChosenProducts<decltype(zero)>{of_section});
      });
    }
  }
}

}  // namespace kvzap::linalg
