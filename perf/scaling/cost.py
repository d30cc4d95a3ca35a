# The time of a decode step, from bytes, operations and collective calls.
import dataclasses
import math
import pathlib
import tomllib

MACHINES = pathlib.Path(__file__).resolve().parent / "machines.toml"
PARTS = ("weights", "rows", "sums", "exchanges", "rest")


def load_machines(path=MACHINES):
    machines = tomllib.loads(pathlib.Path(path).read_text())
    for name, machine in machines.items():
        machine["name"] = name
        rates = ("memory_all", "flops_all") if "row_seconds" in machine else ("attention", "attention_flops")
        for key in ("memory", "flops", "capacity", "node_ranks", *rates):
            if not machine.get(key, 0) > 0:
                raise ValueError(f"{path}: [{name}] {key} is {machine.get(key)}; expected a positive number")
    return machines


@dataclasses.dataclass
class Layer:
    """Rows of a layer with attention over all tokens, of all sequences: in total, and on the largest rank.

    sent, received: floats of a token that the busiest rank exchanges; messages: ranks that it exchanges with.
    """

    total: float
    largest: float
    is_shared: bool = False
    sent: float = 0
    received: float = 0
    messages: int = 0


def steps_of(ranks):
    """Rounds of a tree over so many ranks."""
    return math.ceil(math.log2(ranks)) if ranks > 1 else 0


def interpolated(points, x):
    """Returns the value at x of a line through points [[x, y], ...], ascending; outside of them the nearest one."""
    for (left, low), (right, high) in zip(points, points[1:]):
        if x <= right:
            return low + (high - low) * max(0, x - left) / (right - left)
    return points[-1][1]


class Network:
    """Collective calls of `ranks` ranks on a machine."""

    def __init__(self, machine, ranks):
        self.machine, self.ranks = machine, ranks
        self.node = machine["node"]
        self.inside = min(ranks, machine["node_ranks"])
        self.outside = math.ceil(ranks / self.inside)
        self.network = machine.get("network", self.node)

    def latency(self):
        return steps_of(self.inside) * self.node["alpha"] + steps_of(self.outside) * self.network["alpha"]

    def meeting(self):
        """Seconds of a meeting in shared memory. If ranks share cores, some have slept and must wake."""
        on_core = max(1, self.ranks / self.machine.get("cores", self.ranks))
        return steps_of(self.ranks) * self.node["alpha"] + math.log2(on_core) * self.node["switch"]

    def copies(self, size):
        """Seconds in which each rank copies `size` bytes from shared memory, on cores that ranks may share."""
        return size / self.node["beta"] * max(1, self.ranks / self.machine.get("cores", self.ranks))

    def sum(self, size):
        """A sum of `size` bytes over ranks: a tree for few bytes, else halving and doubling, near ranks first."""
        if self.ranks == 1:
            return 0
        if self.node.get("shares_memory"):
            return self.meeting() * max(1, math.ceil(size / 65536)) + self.copies((self.ranks + 1) * size)
        tree = self.latency() + size * (steps_of(self.inside) / self.node["beta"]
                                        + steps_of(self.outside) / self.network["beta"])
        part = size / self.inside
        halving = 2 * (self.latency() + size * (1 - 1 / self.inside) / self.node["beta"]
                       + part * (1 - 1 / self.outside) / self.network["beta"])
        return min(tree, halving)

    def gather(self, size):
        """Every rank gets `size` bytes, of which each has an equal part."""
        if self.ranks == 1:
            return 0
        if self.node.get("shares_memory"):
            return self.meeting() * max(1, math.ceil(size / self.ranks / 65536)) + self.copies(size)
        near = size * (self.inside - 1) / self.ranks
        return self.latency() + near / self.node["beta"] + size * (1 - self.inside / self.ranks) / self.network["beta"]

    def exchange(self, size, messages):
        """The busiest rank sends or receives `size` bytes in so many messages."""
        if self.ranks == 1 or messages == 0:
            return 0
        if self.node.get("shares_memory"):
            return self.meeting() * max(1, math.ceil(size / 65536)) + self.copies(2 * size)
        far = 1 - self.inside / self.ranks
        slow = self.network if far > 0 else self.node
        return (slow["alpha"] + messages * slow["message"] + size * (1 - far) / self.node["beta"]
                + size * far / slow["beta"])


class Step:
    """A decode step of one token of each of `tokens` sequences on `ranks` ranks that share a model."""

    def __init__(self, shape, machine, ranks, tokens):
        self.shape, self.machine, self.ranks, self.tokens = shape, machine, ranks, tokens
        self.network = Network(machine, ranks)

    def read(self, largest, total, rate, flops_largest=0, flops_total=0, flops=1):
        """Seconds in which ranks read bytes and compute: of the largest rank, or of what ranks share."""
        seconds = max(largest / rate, flops_largest / flops)
        if "memory_all" in self.machine:
            memory = rate * self.machine["memory_all"] / self.machine["memory"]
            arithmetic = flops * self.machine["flops_all"] / self.machine["flops"]
            seconds = max(seconds, total / memory, flops_total / arithmetic)
        return seconds

    def product(self, weights, value_bytes, tokens, share):
        """Seconds of products of `weights` weights; `share`: those of the largest rank."""
        size, operations = weights * value_bytes, 2 * weights * tokens
        return self.read(size * share, size, self.machine["memory"], operations * share, operations,
                         self.machine["flops"])

    def weights(self):
        shape, tokens = self.shape, self.tokens
        even = 1 / self.ranks
        heads = even if self.ranks > shape.kv_heads else math.ceil(shape.kv_heads / self.ranks) / shape.kv_heads
        layer = self.product(shape.qkv() + shape.o(), 2, tokens, heads)
        if shape.experts:
            touched = shape.touched_experts(tokens)
            layer += self.product(touched * shape.feed_forward(), shape.expert_bytes, tokens * shape.chosen / touched,
                                  even)
            layer += self.product(shape.router(), 2, tokens, 1)  # on every rank
        else:
            layer += self.product(shape.feed_forward(), 2, tokens, even)
        return shape.layers * layer + self.product(shape.head(), 2, tokens, even)

    def rows(self, layers):
        shape, machine = self.shape, self.machine
        row = 4 * shape.dim  # bytes of a key and a value in 16 bits
        operations = 4 * shape.dim * shape.group

        def seconds(largest, total):
            if "row_seconds" in machine:
                one = interpolated(machine["row_seconds"], shape.group)
                return max(largest * one, total * one * machine["flops"] / machine["flops_all"],
                           total * row / machine["memory_all"])
            return self.read(largest * row, total * row, machine["memory"] * machine["attention"],
                             largest * operations, total * operations, machine["attention_flops"])

        total = sum(seconds(layer.largest, layer.total) for layer in layers)
        window = shape.window * self.tokens
        return total + shape.windows * seconds(window * math.ceil(shape.kv_heads / self.ranks), window * shape.kv_heads)

    def sums(self):
        shape, network = self.shape, self.network
        size = 4 * shape.hidden * self.tokens
        few = network.sum(8) + network.sum(8 * (self.tokens + 1))  # outcomes of ranks, and the tokens chosen
        return (2 * shape.layers + 1) * network.sum(size) + few

    def exchanges(self, layers):
        shape, tokens = self.shape, self.tokens
        projected = 4 * tokens * (shape.heads + 2 * shape.kv_heads) * shape.dim
        total = 0
        for layer in layers:
            if not layer.is_shared:
                continue
            total += self.network.gather(projected)
            total += self.network.exchange(4 * tokens * max(layer.sent, layer.received), layer.messages)
        return total

    def calls(self, layers):
        """Returns the number of collective calls: sums, the agreement on errors, and exchanges."""
        if self.ranks == 1:
            return 0
        return 2 * self.shape.layers + 3 + 2 * sum(layer.is_shared for layer in layers)

    def rest(self):
        shape, machine = self.shape, self.machine
        cores = machine.get("cores", self.ranks)
        one = machine["rest_step"] + shape.layers * (machine["rest_layer"]
                                                     + machine["rest_token"] * self.tokens * shape.hidden)
        return one * max(1, self.ranks / cores)

    def parts(self, layers):
        """Returns seconds by part. layers: those with attention over all tokens."""
        if len(layers) != self.shape.full_layers:
            raise ValueError(f"{self.shape.name}: {len(layers)} layers of rows; expected {self.shape.full_layers}")
        return {"weights": self.weights(), "rows": self.rows(layers), "sums": self.sums(),
                "exchanges": self.exchanges(layers), "rest": self.rest()}

    def fits(self, layers):
        """Whether weights and rows fit the memory of a rank."""
        row = 4 * self.shape.dim
        window = self.shape.windows * self.shape.window * self.tokens * self.shape.kv_heads / self.ranks
        rows = sum(layer.largest for layer in layers) + window
        return self.shape.weight_bytes() / self.ranks + rows * row <= 0.9 * self.machine["capacity"]
