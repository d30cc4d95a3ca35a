// The weights of a Model, in the layouts that the decoder multiplies.
#pragma once

#include <kvzap/model/model.hpp>
#include <optional>
#include <vector>

#include "linalg/host/row_kernels.hpp"
#include "linalg/linear_weights.hpp"
#include "linalg/product.hpp"

namespace kvzap {

namespace model {

/// Returns the activation of feed-forward parts if a product's epilogue can apply it: nothing else
/// may come between the product and the activation.
inline std::optional<linalg::Epilogue> epilogue_of(const ModelConfig& config) {
  if (config.gates_feed_forward || config.gate_multiplier != 1 || config.has_inner_norms ||
      config.shared_blocks) {
    return {};
  }
  if (config.activation == Activation::relu) return linalg::Epilogue::relu;
  if (config.activation == Activation::gelu_tanh) return linalg::Epilogue::gelu_tanh;
  return {};
}

}  // namespace model

/// All matrices are (outputs, inputs), as in torch.nn.Linear. Those of the layers may be packed or
/// quantised, and so may an output head that is not tied. Maps of the same input form one matrix,
/// so that a step computes one product for them.
struct Model::Weights {
  using Linear = linalg::LinearWeights;
  using Vector = Kokkos::View<float*, MemorySpace>;
  using Indices = Kokkos::View<int*, MemorySpace>;

  /// This rank's part of a feed-forward part: down (activation(gate x) * up x), or down
  /// (activation(up x)).
  struct FeedForward {
    Linear gate_up;       // (2 * width, hidden): gate, then up; or up alone: (width, hidden)
    Vector gate_up_bias;  // or empty
    /// gate_up_bias in bf16 if a product of gate_up may apply the activation, else empty.
    Kokkos::View<bfloat16*, MemorySpace> rounded_bias;
    Linear down;          // (hidden, width)
    Vector down_bias;     // on rank 0 alone: it is added once, before the sum over ranks
    Vector inner_norm;    // (width): of the inputs of down; or empty
    linalg::Xielu xielu;  // of Activation::xielu
    float limit = 0;      // LayerConfig::dense_limit or experts_limit
  };

  /// Latent attention (LatentConfig), for this rank's query heads. Keys are in the engine's order
  /// of dimensions; those of queries and of RoPE's key are rotated pair by pair: first ones, then
  /// second ones.
  struct Latent {
    Linear query_in;                 // (query_rank, hidden), or empty
    Vector query_in_bias;            // or empty
    Vector query_norm;               // (query_rank), or empty
    Linear query;                    // (query heads * query_dim, query_rank or hidden)
    Linear row_in;                   // (rank + rope_dim, hidden): latent, then RoPE's key
    Vector row_in_bias;              // or empty
    Vector row_norm;                 // (rank)
    std::vector<Linear> to_key;      // (query head): (head_dim, nope_dim), 0 for RoPE's dimensions
    std::vector<Linear> from_value;  // (query head): (value_dim, head_dim), 0 for the same
    Linear head_gates;               // (query heads, hidden), or empty
  };

  /// The maps of a group of Mamba-1's channels, for this rank's channels of the group
  /// (StateSpaceConfig).
  struct SpaceGroup {
    std::int64_t number = 0;  // among those of all ranks
    Linear latents;           // (step_rank + 2 state_dim, channels): part of the sum over ranks
    Linear steps;             // (channels, step_rank)
  };

  /// Maps of low rank that a layer adds to those of a shared block (SharedBlocksConfig). Several
  /// parts have their latents one after the other.
  struct Adapter {
    Linear in;                // (parts * rank, inputs), on every rank; or empty
    std::vector<Linear> out;  // (part): (outputs, rank)
  };

  /// A norm of the residual stream, or none.
  struct Norm {
    Vector weight;  // (hidden), or empty
    Vector bias;    // (hidden), or empty
  };

  /// A layer's part of LayerInputsConfig. A rank has a part of the columns of the table.
  struct LayerInputs {
    Linear table;       // (vocabulary, columns)
    Linear projection;  // (size, hidden): of the embedding, on every rank
    Linear gate;        // (columns, hidden)
    Linear out;         // (hidden, columns)
    Norm norm;          // of the output
  };

  /// A layer's part of AltUpConfig, on every rank.
  struct AltUp {
    Norm router_norm;
    Linear router;      // (streams, hidden)
    Linear prediction;  // (streams * streams, streams): of each stream, from each stream
    Linear correction;  // (streams, streams)
    Vector scale;       // (hidden), or empty
    Linear laurel_in;   // (rank, hidden)
    Linear laurel_out;  // (hidden, rank)
    Norm laurel_norm;
  };

  /// This rank's part of one layer's weights.
  struct Layer {
    // Norms of the input and of the output of attention and feed-forward part. Parallel parts with
    // one norm have it as attention_in.
    Norm attention_in, attention_out, feed_forward_in, feed_forward_out;
    // Outputs of q, then k, then v: ((query heads + 2 KV heads) * dim, hidden); of q alone if the
    // layer reads another one's rows. Their biases, or empty.
    Linear qkv;
    Vector qkv_bias;
    Linear o;  // (hidden, query heads * dim), or with latent attention * value_dim
    Latent latent;
    Vector o_bias;  // on rank 0 alone
    // (dim) or, for norms of rows and LayerNorms, (query heads * dim) and (KV heads * dim); or
    // empty.
    Vector q_norm, k_norm;
    Vector q_norm_bias, k_norm_bias;  // of LayerNorms; or empty
    // Those of the heads of all ranks, for norms of rows and LayerNorms; or empty.
    Vector q_norm_of_all, k_norm_of_all, q_norm_bias_of_all, k_norm_bias_of_all;
    Vector inner_norm;  // (query heads * dim): of the inputs of o; or empty
    Vector sinks;       // (query heads), or empty
    // (query heads * dim, hidden), (query heads, hidden) with ModelConfig::gates_heads, or empty.
    Linear attention_gate;
    Vector attention_gate_bias;  // or empty
    // Dimensions of the first gate's head before this rank's inputs of o.
    std::int64_t attention_gate_skip = 0;
    // Layers without attention have no q, k and v; `o` is the last map of their token mixer.
    // Of layers with a gated delta net. Each rank
    // has some key heads (HeadPartition::state_heads), with their value heads.
    Linear delta_in;  // the channels of each key head (DeltaNetConfig), then gates of the outputs
    Linear delta_rates;  // (value heads, hidden): strengths, then decays of each value head; empty
                         // if decays are fixed
    // With DeltaNetConfig::gate_rank, delta_in and delta_rates have neither gates nor decays.
    Linear delta_latents;       // (2 * gate_rank, hidden): of decays, then of gates; on every rank
    Linear delta_decays_out;    // (value heads * decays, gate_rank)
    Linear delta_gates_out;     // (value heads * value_dim, gate_rank)
    Vector delta_decay_rates;   // (value heads): exp(A_log), or fixed decays
    Vector delta_decay_shifts;  // (value heads * decays): dt_bias, or empty
    Vector delta_norm;          // (value_dim), or (value heads * value_dim) of one norm of all
    // The convolution of a delta net, a state space or a short convolution.
    Vector convolution;       // (kernel, channels), oldest token first
    Vector convolution_bias;  // or empty
    // The first map of a state space (engine::StateSpace) or a short convolution.
    Linear mixer_in;
    Vector mixer_in_bias;  // or empty
    // Of layers with a state space. Each rank has some heads (HeadPartition::state_heads), and the
    // groups that these belong to.
    Linear space_out;       // the last map, (hidden, heads * head_dim), beside attention; else `o`
    Vector space_out_bias;  // on rank 0 alone
    // Of Mamba-1: (head, state_dim, head_dim), and of each channel.
    Vector space_rates;     // (head): exp(A_log)
    Vector space_shifts;    // (head): dt_bias
    Vector space_skips;     // (head): D
    Vector space_norm;      // (head * head_dim), or empty
    Indices space_heads;    // (group + 1): the first head of each group, of this rank's
    Indices space_group;    // (head): its group, of this rank's
    Indices space_numbers;  // (group): its number among those of all ranks
    std::vector<SpaceGroup> space_groups;  // of Mamba-1
    Vector latent_norm;                    // (latents) of Mamba-1: of l, B and C; or empty
    // Of layers with a shared block: the norm of the state space's input, this layer's maps beside
    // the block's, and the map of the block's output: this rank's columns of (hidden, hidden).
    Norm space_in;
    Adapter qkv_adapter, gate_up_adapter;
    Linear block_out;
    FeedForward dense;  // or the shared expert; empty if there is none
    // Of layers with experts. Each rank has a part of each expert, and the whole router.
    std::vector<FeedForward> experts;
    Linear router;       // (experts, hidden)
    Vector router_bias;  // (experts), or empty
    Vector correction;   // (experts), or empty
    Linear shared_gate;  // (1, hidden), or empty
    // Of experts beside a dense part (ExpertsConfig::beside_dense): norms of the outputs of both,
    // and of the inputs of the router and the experts; factors of the experts' weights (experts).
    Norm dense_out, experts_out, router_in, experts_in;
    Vector expert_scales;
    LayerInputs inputs;
    AltUp alt_up;
    float scale = 1;  // of the output (ModelConfig::scales_layers)
  };

  std::vector<Layer> layers;
  Norm embedding_norm;  // or none
  Norm final_norm;      // none: the layers run elsewhere (Model::without_weights)
  bool are_here() const { return final_norm.weight.extent(0) > 0; }
  // The rows first_token … first_token + extent(0) - 1 of the vocabulary.
  Linear embedding;  // plain rows, packed if it is the head too, or quantised
  std::int64_t first_token = 0;
  // (position, hidden), or empty. On rank 0 alone: the sum over ranks adds it once.
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> positions;
  Vector inputs_norm;  // (LayerInputsConfig::size): of all layers' projections; or empty
  // Maps (hidden, hidden) of the embedding to each stream but the first, and of these streams to
  // the input of the final norm.
  std::vector<Linear> stream_in, stream_out;
  // Between the final norm and the output head: a map (hidden, hidden), an activation and a norm;
  // or empty.
  Linear output_map;
  Norm output_map_norm;
  Linear output_head;  // the same rows
  Vector head_bias;    // of the same rows, or empty
};

}  // namespace kvzap
