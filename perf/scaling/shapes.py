# Shapes of models, and the bytes and operations of a decode step, as config.json gives them.
import dataclasses
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "inputs" / "configs", pathlib.Path(__file__).resolve().parent / "configs"]
# Models of docs/performance/scaling.md.
MODELS = ["Qwen3-8B", "Llama-3.1-8B-Instruct", "Qwen3-32B", "gpt-oss-120b", "Qwen3-235B-A22B"]


@dataclasses.dataclass
class Shape:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    width: int  # of the feed-forward part, or of one expert
    vocab: int
    experts: int = 0
    chosen: int = 0  # experts of a token
    expert_bytes: float = 2  # of a weight of an expert
    window: int = 0  # of layers that see a window
    windows: int = 0  # number of such layers

    @property
    def group(self):
        return self.heads // self.kv_heads

    @property
    def full_layers(self):
        return self.layers - self.windows

    def qkv(self):
        """Weights of q, k and v of a layer."""
        return self.hidden * (self.heads + 2 * self.kv_heads) * self.dim

    def o(self):
        return self.heads * self.dim * self.hidden

    def feed_forward(self):
        """Weights of the feed-forward part, or of one expert."""
        return 3 * self.hidden * self.width

    def router(self):
        return self.hidden * self.experts

    def head(self):
        return self.vocab * self.hidden

    def weight_bytes(self):
        """Bytes of all weights, without norms; a tied embedding counts once more."""
        if self.experts:
            feed_forward = self.experts * self.feed_forward() * self.expert_bytes + 2 * self.router()
        else:
            feed_forward = 2 * self.feed_forward()
        return self.layers * (2 * (self.qkv() + self.o()) + feed_forward) + 4 * self.head()

    def touched_experts(self, tokens):
        """Expected number of experts that at least one of `tokens` tokens chooses, if all are equally likely."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** tokens) if self.experts else 0


def shape_of(config, name):
    """Returns the shape of a config.json. Raises ValueError if a field is missing."""
    def field(key, *others):
        for k in (key, *others):
            if config.get(k) is not None:
                return config[k]
        raise ValueError(f"{name}: config.json has no {key}")

    if "delta" in str(config.get("layer_types", "")) or "linear_num_key_heads" in config:
        raise ValueError(f"{name}: the cost model has no gated delta nets")
    heads, hidden = field("num_attention_heads"), field("hidden_size")
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    layers = field("num_hidden_layers")
    is_oss = config.get("model_type") == "gpt_oss"
    packed = config.get("quantization_config", {}).get("quant_method") == "mxfp4"
    return Shape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=field("num_key_value_heads"),
        dim=config.get("head_dim") or hidden // heads,
        width=field("moe_intermediate_size", "intermediate_size") if experts else field("intermediate_size"),
        vocab=field("vocab_size"), experts=experts, chosen=field("num_experts_per_tok") if experts else 0,
        expert_bytes=17 / 32 if packed else 2, window=config.get("sliding_window") or 0 if is_oss else 0,
        windows=layers // 2 if is_oss else 0)


def load(name):
    """Returns the shape of a model of inputs/configs or perf/scaling/configs, or of a folder."""
    for folder in [pathlib.Path(name), *(f / name for f in FOLDERS)]:
        path = folder / "config.json"
        if path.exists():
            return shape_of(json.loads(path.read_text()), folder.name)
    raise ValueError(f"no model '{name}': expected a folder with config.json, or one of {', '.join(MODELS)}")
