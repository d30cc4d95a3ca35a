#include "base/launch_graph.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <kvzap/core/types.hpp>
#include <string_view>

#include "base/launch.hpp"

namespace kvzap::base {

#if defined(KOKKOS_ENABLE_CUDA)

struct LaunchGraph::Recorded {
  cudaGraphExec_t graph = nullptr;

  explicit Recorded(cudaGraphExec_t executable) : graph(executable) {}
  ~Recorded() { cudaGraphExecDestroy(graph); }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;
};

namespace {

/// Ends the recording of a stream. Returns null if it failed.
cudaGraph_t end_capture(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  if (cudaStreamEndCapture(stream, &graph) == cudaSuccess) return graph;
  cudaGetLastError();  // forgets the error
  if (graph != nullptr) cudaGraphDestroy(graph);
  return nullptr;
}

cudaError_t instantiate(cudaGraphExec_t& executable, cudaGraph_t graph) {
#if CUDART_VERSION >= 12000
  return cudaGraphInstantiate(&executable, graph, 0);
#else
  return cudaGraphInstantiate(&executable, graph, nullptr, nullptr, 0);
#endif
}

}  // namespace

bool LaunchGraph::record(const ExecutionSpace& exec, const std::function<void()>& work) {
  clear();
  const cudaStream_t stream = exec.cuda_stream();
  // Relaxed: a first use of a kernel may set its limits, or allocate.
  if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  try {
    work();
  } catch (...) {
    if (const cudaGraph_t graph = end_capture(stream)) cudaGraphDestroy(graph);
    throw;
  }
  const cudaGraph_t graph = end_capture(stream);
  if (graph == nullptr) return false;
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = instantiate(executable, graph);
  cudaGraphDestroy(graph);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  m_recorded = std::make_unique<Recorded>(executable);
  return true;
}

void LaunchGraph::launch(const ExecutionSpace& exec) const {
  const cudaError_t status = cudaGraphLaunch(m_recorded->graph, exec.cuda_stream());
  if (status != cudaSuccess) {
    throw Error(fmt::format("CUDA: a graph cannot be launched: {}", cudaGetErrorString(status)));
  }
}

#else

struct LaunchGraph::Recorded {
  std::vector<std::function<void()> > launches;
};

bool LaunchGraph::record(const ExecutionSpace& /*exec*/, const std::function<void()>& work) {
  clear();
  auto recorded = std::make_unique<Recorded>();
  struct Keeping {
    explicit Keeping(std::vector<std::function<void()> >& launches) { kept_launches = &launches; }
    ~Keeping() { kept_launches = nullptr; }
    Keeping(const Keeping&) = delete;
    Keeping& operator=(const Keeping&) = delete;
  };
  {
    const Keeping keeping(recorded->launches);
    work();
  }
  m_recorded = std::move(recorded);
  return true;
}

void LaunchGraph::launch(const ExecutionSpace& /*exec*/) const {
  for (const auto& launch : m_recorded->launches) launch();
}

#endif

// Names a wrong KVZAP_GRAPH before the first step.
LaunchGraph::LaunchGraph() { is_available(); }
LaunchGraph::~LaunchGraph() = default;

void LaunchGraph::clear() { m_recorded.reset(); }

bool LaunchGraph::is_available() {
#if defined(KOKKOS_ENABLE_CUDA)
  constexpr bool has_graphs = true;
#else
  constexpr bool has_graphs = runs_on_host;
#endif
  const char* const asked = std::getenv("KVZAP_GRAPH");
  const std::string_view name = asked ? asked : "";
  if (name.empty() || name == "on") return has_graphs;
  if (name == "off") return false;
  throw Error(fmt::format("KVZAP_GRAPH is \"{}\"; expected on or off", name));
}

}  // namespace kvzap::base
