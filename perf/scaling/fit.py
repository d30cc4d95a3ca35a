# Constants of a machine from measured steps, and the check of the model against others.
import math

import cost
import measure
import shapes
import splits

CONSTANTS = ("memory", "memory_all", "flops", "flops_all", "switch")


def shape_of(case):
    shape = shapes.load("Qwen3-0.6B")
    shape.layers, shape.kv_heads = case["layers"], case["kv_heads"]
    return shape


def one(measured, **wanted):
    wanted = {"role": "fit", "batch": 1, "depth": 16, "layers": 16, "ranks": 1, "kv_heads": 8, **wanted}
    for case in measured:
        if all(case[key] == value for key, value in wanted.items()):
            return case
    raise ValueError(f"no measured case {wanted}; run perf/scale measure")


def read_weights(shape):
    """Weights that a step of one token multiplies."""
    return shape.layers * (shape.qkv() + shape.o() + shape.feed_forward()) + shape.head()


def rest(machine, case):
    shape = shape_of(case)
    return machine["rest_step"] + shape.layers * (machine["rest_layer"]
                                                  + machine["rest_token"] * case["batch"] * shape.hidden)


def fitted(machine, measured):
    """Returns the machine with constants from the cases whose role is "fit", one constant from each."""
    machine = {**machine, "node": dict(machine["node"])}
    small, large = one(measured, layers=4), one(measured)
    size = 2 * (read_weights(shape_of(large)) - read_weights(shape_of(small)))
    machine["memory"] = size / (large["seconds"] - small["seconds"] - rest(machine, large) + rest(machine, small))

    machine["row_seconds"] = []
    for wanted in ({"depth": 32768, "layers": 4}, {"depth": 131072, "layers": 8, "kv_heads": 2},
                   {"depth": 131072, "layers": 4, "kv_heads": 1}):
        case = one(measured, **wanted)
        shape = shape_of(case)
        seconds = case["seconds"] - 2 * read_weights(shape) / machine["memory"] - rest(machine, case)
        total = sum(sum(layer) for layer in measure.bench_rows(case)[0])
        machine["row_seconds"].append([shape.group, seconds / total])

    batch = one(measured, batch=16)
    work = 2 * 16 * read_weights(shape_of(batch))
    machine["flops"] = work / (batch["seconds"] - rest(machine, batch))
    two = one(measured, batch=16, ranks=2)
    calls = cost.Step(shape_of(two), machine, 2, 16).sums()
    machine["flops_all"] = work / (two["seconds"] - calls - rest(machine, two))

    pair = one(measured, ranks=2)
    calls = cost.Step(shape_of(pair), machine, 2, 1).sums()
    machine["memory_all"] = 2 * read_weights(shape_of(pair)) / (pair["seconds"] - calls - rest(machine, pair))

    # Four and eight ranks on two cores: the rest of their time are meetings for which ranks must wake.
    machine["node"]["switch"] = 0
    left = meetings = 0
    for ranks in (4, 8):
        case = one(measured, ranks=ranks)
        shape = shape_of(case)
        step = cost.Step(shape, machine, ranks, 1)
        left += case["seconds"] - sum(step.parts([cost.Layer(0, 0)] * shape.layers).values())
        meetings += (2 * shape.layers + 3) * math.log2(ranks / machine["cores"])
    machine["node"]["switch"] = max(0, left / meetings)
    return machine


def constants(machine):
    """Returns the names and values of fitted constants."""
    found = {name: constant(machine, name) for name in CONSTANTS}
    return {**found, **{f"row_seconds, group {group}": seconds for group, seconds in machine["row_seconds"]}}


def constant(machine, name):
    return machine["node"][name] if name in machine["node"] else machine[name]


def modelled(machine, case, replay):
    """Returns seconds by part of a measured case, and the number of collective calls."""
    shape = shape_of(case)
    layers = replay(shape, measure.bench_rows(case), [case["ranks"]])[case["ranks"]]
    placed = splits.heads_only(layers) if case.get("balance") == 0 else splits.balanced(layers)
    step = cost.Step(shape, machine, case["ranks"], case["batch"])
    return step.parts(placed), step.calls(placed)


def checked(machine, measured, program):
    """Returns [(case, seconds by part, relative error, calls)] of all measured cases."""
    result = []
    for case in measured:
        parts, calls = modelled(machine, case, splits.Replayer(program, case.get("balance", 0.05) or 0.05))
        result.append((case, parts, sum(parts.values()) / case["seconds"] - 1, calls))
    return result
