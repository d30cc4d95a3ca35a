// The cache of a model that Python runs, such as one of transformers.
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <kvzap/core/threads.hpp>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/thresholds.hpp>
#include <optional>
#include <tuple>

#include "arrays.hpp"
#include "llm.hpp"
#include "session/model_setup.hpp"

namespace kvzap::python {
namespace {

using Array = nb::ndarray<>;

constexpr bool is_on_host = Kokkos::SpaceAccessibility<Kokkos::HostSpace, MemorySpace>::accessible;
#if defined(KOKKOS_ENABLE_HIP)
using Device = nb::device::rocm;
#elif defined(KOKKOS_ENABLE_SYCL)
using Device = nb::device::oneapi;
#else
using Device = nb::device::cuda;
#endif

DType dtype_of(const Array& array, const char* name) {
  const nb::dlpack::dtype type = array.dtype();
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
  };
  if (is(nb::dlpack::dtype_code::Float, 32)) return DType::f32;
  if (is(nb::dlpack::dtype_code::Float, 16)) return DType::f16;
  if (is(nb::dlpack::dtype_code::Bfloat, 16)) return DType::bf16;
  throw nb::type_error(
      (std::string(name) + ": expected values of float32, float16 or bfloat16").c_str());
}

/// A tensor (head, token, dim), as attention of transformers has it, as rows of tokens; or a matrix
/// (token, column). Null is absent. The view is valid while `kept` has the array.
ArrayView view_of(const nb::handle& tensor, const char* name, bool is_matrix,
                  std::vector<Array>& kept) {
  if (tensor.is_none()) return {};
  kept.push_back(as<Array>(tensor, name, "a tensor"));
  const Array& array = kept.back();
  if (array.device_type() != (is_on_host ? nb::device::cpu::value : Device::value)) {
    throw nb::value_error((std::string(name) + ": expected a tensor on the " +
                           (is_on_host ? "CPU" : "GPU") + ", where this package computes")
                              .c_str());
  }
  const std::size_t dimensions = is_matrix ? 2 : 3;
  if (array.ndim() != dimensions) {
    throw nb::value_error((std::string(name) + ": expected " + std::to_string(dimensions) +
                           " dimensions, found " + std::to_string(array.ndim()))
                              .c_str());
  }
  ArrayView view;
  view.dtype = dtype_of(array, name);
  view.data = array.data();
  const auto extent = [&](std::size_t i) { return static_cast<std::int64_t>(array.shape(i)); };
  if (is_matrix) {
    view.extents = {extent(0), 1, extent(1)};
    view.strides = {array.stride(0), 0, array.stride(1)};
  } else {
    view.extents = {extent(1), extent(0), extent(2)};
    view.strides = {array.stride(1), array.stride(0), array.stride(2)};
  }
  return view;
}

StepPart part_from_name(const std::string& name) {
  if (name == "context") return StepPart::context;
  if (name == "held") return StepPart::held;
  if (name == "question") return StepPart::question;
  if (name == "generated") return StepPart::generated;
  throw nb::value_error(
      ("part: expected context, held, question or generated, found " + name).c_str());
}

// What the cache of a model that runs elsewhere does not keep, or an empty string.
std::string unsupported_part(const ModelConfig& config) {
  if (config.latent) return "latent attention";
  if (config.delta_net && config.delta_net->kind == DeltaNetConfig::Kind::lightning) {
    return "lightning attention";
  }
  if (config.value_dim > 0 && config.value_dim < config.head_dim)
    return "values of another size than keys";
  for (const LayerConfig& layer : config.layers) {
    if (layer.rows_of >= 0) return "layers that read the keys and values of another layer";
    if (layer.mixing != TokenMixing::attention && layer.mixing != TokenMixing::delta_net) {
      return "layers other than attention and gated delta nets";
    }
  }
  return "";
}

std::shared_ptr<Engine> make_engine(const std::filesystem::path& folder, DType dtype,
                                    Pruning pruning, int threads, int page_rows,
                                    const std::string& kv_type) {
  const Communicator comm = Communicator::self();
  ModelConfig config = ModelConfig::load(folder);
  if (const std::string part = unsupported_part(config); !part.empty()) {
    throw Error("config: " + config.architecture + " has " + part +
                ", which kvzap.Cache does not keep; expected kvzap.LLM for it");
  }
  const std::int64_t layers = config.num_hidden_layers;
  const auto setup = session::deal_model(folder.string(), std::move(config), layers, {}, 1);
  check(pruning);
  if (pruning.prunes() && pruning.info()->repeats_context) {
    throw Error("policy " + pruning.info()->name +
                ": the model would have to read the context twice; expected a policy that scores "
                "within one reading");
  }
  resolve_threshold(pruning, comm, true);
  set_threads(threads > 0 ? threads : threads_of_rank(comm));
  CacheOptions options;
  static_cast<LoadedPruning&>(options) = session::load_policy(pruning, setup, dtype, comm);
  if (options.policy && options.policy->learner) {
    throw Error(
        "policy " + options.policy->name +
        ": the model would have to read texts first; expected a policy without such a step");
  }
  options.pruning.window = session::ring_rows(pruning.window, setup.config.longest_context());
  options.page_rows = page_rows;
  if (!kv_type.empty()) options.page_format = page_format_from_name(kv_type, dtype);
  return Engine::create(
      std::make_shared<const Model>(Model::without_weights(setup.config, dtype, setup.partition)),
      options.scorer(), options, comm);
}

/// An engine that ends before Kokkos does. Its functions throw Error afterwards.
class HeldEngine {
 public:
  explicit HeldEngine(std::shared_ptr<Engine> engine) : m_held(std::move(engine)) {}

  Engine& operator*() const {
    if (has_ended()) throw Error("the cache has ended with the interpreter");
    return *m_held.get();
  }
  bool has_ended() const { return m_held.get() == nullptr; }
  std::shared_ptr<Engine> share() const { return m_held.get(); }

 private:
  Held<Engine> m_held;
};

/// A checkpoint that ends before Kokkos does, and before its engine.
class HeldCheckpoint {
 public:
  HeldCheckpoint(std::shared_ptr<Engine> engine, std::unique_ptr<Engine::Checkpoint> checkpoint)
      : m_held(std::make_shared<State>(State{std::move(engine), std::move(checkpoint)})) {}

  const Engine::Checkpoint& operator*() const {
    if (!m_held.get()) throw Error("the cache has ended with the interpreter");
    return *m_held.get()->checkpoint;
  }

 private:
  struct State {
    std::shared_ptr<Engine> engine;
    std::unique_ptr<Engine::Checkpoint> checkpoint;  // destroyed first
  };
  Held<State> m_held;
};

/// Arrays that one layer of one sequence needs: queries, keys, values, output (head, token, dim),
/// hidden (token, hidden_size), output weights (hidden_size, query heads * dim), sinks (1, query
/// heads); the last three may be None.
ExternalLayer layer_of(const nb::tuple& arrays, std::vector<Array>& kept) {
  if (nb::len(arrays) != 7) throw nb::value_error("spans: expected seven arrays for each sequence");
  ExternalLayer layer;
  layer.queries = view_of(arrays[0], "queries", false, kept);
  layer.keys = view_of(arrays[1], "keys", false, kept);
  layer.values = view_of(arrays[2], "values", false, kept);
  layer.output = view_of(arrays[3], "output", false, kept);
  layer.hidden = view_of(arrays[4], "hidden", true, kept);
  layer.output_weights = view_of(arrays[5], "output_weights", true, kept);
  layer.sinks = view_of(arrays[6], "sinks", true, kept);
  return layer;
}

void attend(const HeldEngine& held, int layer, const nb::sequence& spans) {
  std::vector<Array> kept;
  std::vector<ExternalLayer> layers;
  for (const nb::handle& span : spans) {
    layers.push_back(layer_of(as<nb::tuple>(span, "spans", "tuples of arrays"), kept));
  }
  in_engine([&] {
    (*held).attend(layer, layers);
    check_signals();
  });
}

constexpr std::int64_t most_tokens = std::int64_t{1} << 24;  // of a step

using Step = std::tuple<SequenceId, std::int64_t, std::string>;  // sequence, tokens, part

void begin_step(const HeldEngine& held, const std::vector<Step>& spans) {
  in_engine([&] {
    StepBatch batch;
    for (const auto& [sequence, count, part] : spans) {
      if (count < 1 || count > most_tokens) {
        throw Error("a step of " + std::to_string(count) + " tokens; expected 1 to " +
                    std::to_string(most_tokens));
      }
      batch.add(sequence, std::vector<TokenId>(static_cast<std::size_t>(count)),
                (*held).rule(sequence, part_from_name(part)), StepOutput::none);
    }
    (*held).begin_step(batch);
  });
}

/// Reports of sequences, with the fields of `report` of a session that belong to a cache.
nb::list reports(const HeldEngine& held, const std::vector<SequenceId>& sequences) {
  const auto all = in_engine([&] { return (*held).reports(sequences); });
  nb::list result;
  for (const CacheReport& cache : all) {
    nb::dict fields = report_fields(cache);
    fields["live_bytes"] = cache.own_bytes;
    result.append(fields);
  }
  return result;
}

void check_head(const Engine& engine, std::int64_t layer, std::int64_t head) {
  require_index("layer", layer, engine.config().num_hidden_layers);
  require_index("head", head, engine.config().kv_heads_of(layer));
}

using EngineClass = nb::class_<HeldEngine>;

void bind_sequences(EngineClass& engine) {
  engine
      .def(
          "__init__",
          [](HeldEngine* self, const std::filesystem::path& folder, const std::string& dtype,
             const nb::object& pruning, const nb::object& given_threads, int page_rows,
             const std::string& kv_type) {
            SessionOptions options;
            const int threads = threads_of(given_threads);
            const Pruning wanted = pruning_of(pruning, options);
            const DType type = dtype_from_name(dtype);
            new (self) HeldEngine(in_engine(
                [&] { return make_engine(folder, type, wanted, threads, page_rows, kv_type); }));
          },
          nb::arg("folder"), nb::arg("dtype"), nb::arg("pruning").none(), nb::arg("threads").none(),
          nb::arg("page_rows"), nb::arg("kv_type") = "")
      .def("add_sequence",
           [](const HeldEngine& held) { return in_engine([&] { return (*held).add_sequence(); }); })
      .def("fork",
           [](const HeldEngine& held, SequenceId source) {
             return in_engine([&] { return (*held).fork(source); });
           })
      .def("fork_beginning",
           [](const HeldEngine& held, SequenceId source, std::int64_t tokens) {
             return in_engine([&] { return (*held).fork_beginning(source, tokens); });
           })
      .def("free",
           [](const HeldEngine& held, const std::vector<SequenceId>& sequences) {
             if (held.has_ended() || is_forked_child()) return;
             locked([&] {
               for (const SequenceId sequence : sequences) (*held).free_sequence(sequence);
               if ((*held).options().trim) (*held).trim();
             });
           })
      .def("checkpoint",
           [](const HeldEngine& held, SequenceId sequence) {
             return in_engine([&] {
               return std::make_unique<HeldCheckpoint>(held.share(), (*held).checkpoint(sequence));
             });
           })
      .def("restore",
           [](const HeldEngine& held, SequenceId sequence, const HeldCheckpoint& checkpoint) {
             in_engine([&] { (*held).restore(sequence, *checkpoint); });
           })
      .def("tokens", [](const HeldEngine& held, SequenceId sequence) {
        return in_engine([&] { return (*held).tokens(sequence); });
      });
}

void bind_steps(EngineClass& engine) {
  engine.def("begin_step", &begin_step, nb::arg("spans"))
      .def("attend", &attend, nb::arg("layer"), nb::arg("spans"))
      .def("end_step", [](const HeldEngine& held) { in_engine([&] { (*held).end_step(); }); })
      .def("cancel_step",
           [](const HeldEngine& held) {
             if (held.has_ended() || is_forked_child()) return;
             locked([&] { (*held).cancel_step(); });
           })
      .def("needs_hidden",
           [](const HeldEngine& held) { return in_engine([&] { return (*held).needs_hidden(); }); })
      .def("can_hold",
           [](const HeldEngine& held, SequenceId sequence) {
             return in_engine([&] { return (*held).can_hold(sequence); });
           })
      .def("keeps_beginnings",
           [](const HeldEngine& held) {
             return in_engine(
                 [&] { return (*held).keeps_beginnings((*held).config().longest_context()); });
           })
      .def("check_more_context",
           [](const HeldEngine& held, SequenceId sequence, std::int64_t count) {
             in_engine([&] { (*held).check_more_context(sequence, count); });
           })
      .def("end_context", [](const HeldEngine& held, SequenceId sequence, bool judges) {
        in_engine([&] {
          if (judges) (*held).judge_context(sequence);
          (*held).end_context(sequence);
          if ((*held).options().trim) (*held).trim();
        });
      });
}

void bind_contents(EngineClass& engine) {
  engine.def("reports", &reports, nb::arg("sequences"))
      .def("pruning_text",
           [](const HeldEngine& held) {
             return in_engine([&] { return (*held).options().pruning.text(); });
           })
      .def("positions",
           [](const HeldEngine& held, SequenceId sequence, std::int64_t layer, std::int64_t head) {
             return array_of(in_engine([&] {
               check_head(*held, layer, head);
               return (*held).positions(sequence, static_cast<int>(layer), static_cast<int>(head));
             }));
           })
      .def("rows",
           [](const HeldEngine& held, SequenceId sequence, std::int64_t layer, std::int64_t head,
              bool values) {
             std::vector<float> rows;
             std::size_t dim = 1;
             in_engine([&] {
               check_head(*held, layer, head);
               dim = static_cast<std::size_t>((*held).config().head_dim_of(layer));
               rows =
                   (*held).rows(sequence, static_cast<int>(layer), static_cast<int>(head), values);
             });
             return matrix_of(std::move(rows), dim);
           })
      .def("scores",
           [](const HeldEngine& held, SequenceId sequence, std::int64_t layer, std::int64_t head) {
             return array_of(in_engine([&] {
               check_head(*held, layer, head);
               auto all = (*held).scores(sequence, static_cast<int>(layer));
               return std::move(all.at(static_cast<std::size_t>(head)));
             }));
           });
}

}  // namespace

void bind_external_cache(nb::module_& module) {
  nb::class_<HeldCheckpoint>(module, "_Checkpoint");
  EngineClass engine(module, "_Engine", nb::is_weak_referenceable());
  bind_sequences(engine);
  bind_steps(engine);
  bind_contents(engine);
}

}  // namespace kvzap::python
