#!/usr/bin/env python3
"""kvzap train beside kvpress' trainer: the same pairs, the same cores, one run.

  build/peers/bin/python perf/peers/train_surrogates.py PAIRS.h5 TEST.h5 [--kvzap "mpirun -n 2 build/kvzap"]

PAIRS.h5 and TEST.h5 are files of kvzap collect, from different texts. Both programs train on the first;
what comes out is judged on the second, by the squared Pearson correlation of predicted and oracle scores
for each layer and KV head. kvpress' trainer (kvzap/train.py of its repository) is not in its package; what
it calls is: scikit-learn's Ridge() layer by layer, and skorch's NeuralNetRegressor over kvpress' own
KVzapModel, all layers at once, with AdamW, mean squared error, cosine annealing over epochs, gradients
clipped at norm 1, batches shuffled, and 5 % of the pairs kept back. In float32, as processors like it.

kvzap's seconds are those of the whole program, which reads its pairs from the file and writes the surrogate; of the
peer those of fitting, with all pairs in memory, and those of reading them there by h5py are told apart.
"""
import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def read_pairs(file, numpy, h5py):
    """(pair, layer, hidden size) and (pair, layer, KV head) of a file's finished texts, float32."""
    with h5py.File(file) as data:
        count = int(data["texts/begin"][int(data.attrs["texts"])])
        layers = len(data["layers"])
        hidden = numpy.stack([data[f"layers/{l}/hidden"][:count].astype(numpy.float32) for l in range(layers)], 1)
        scores = numpy.stack([data[f"layers/{l}/scores"][:count] for l in range(layers)], 1)
    good = numpy.isfinite(scores).all((1, 2)) & numpy.isfinite(hidden).all((1, 2))
    return hidden[good], scores[good]


def squared_correlation(numpy, predicted, oracle):
    """(layer, KV head) of two (pair, layer, KV head)."""
    x = predicted - predicted.mean(0, dtype=numpy.float64)
    y = oracle - oracle.mean(0, dtype=numpy.float64)
    return (x * y).mean(0) ** 2 / ((x * x).mean(0) * (y * y).mean(0))


def train_linear(x, y, options):
    import torch
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
    from sklearn.linear_model import Ridge

    start = time.perf_counter()
    fits = [Ridge().fit(x[:, layer], y[:, layer]) for layer in range(x.shape[1])]
    seconds = time.perf_counter() - start
    model = KVzapModel(KVzapConfig(input_dim=x.shape[2], hidden_dim=None, output_dim=y.shape[2], n_modules=x.shape[1]))
    with torch.no_grad():
        for module, fit in zip(model.layers, fits):
            module.weight.copy_(torch.from_numpy(fit.coef_))
            module.bias.copy_(torch.from_numpy(fit.intercept_))
    return model, seconds


def train_mlp(x, y, options):
    import torch
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
    from skorch import NeuralNetRegressor
    from skorch.callbacks import GradientNormClipping, LRScheduler
    from skorch.dataset import ValidSplit

    torch.manual_seed(options.seed)
    model = KVzapModel(KVzapConfig(input_dim=x.shape[2], hidden_dim=options.hidden or x.shape[2] // 8,
                                   output_dim=y.shape[2], n_modules=x.shape[1]))
    net = NeuralNetRegressor(
        model, criterion=torch.nn.MSELoss(), optimizer=torch.optim.AdamW, lr=options.lr, max_epochs=options.epochs,
        batch_size=options.batch, iterator_train__shuffle=True, device="cpu", verbose=0,
        train_split=ValidSplit(0.05, random_state=42),
        callbacks=[LRScheduler(policy="CosineAnnealingLR", T_max=options.epochs), GradientNormClipping(1.0)])
    start = time.perf_counter()
    net.fit(torch.from_numpy(x), torch.from_numpy(y))
    return net.module_, time.perf_counter() - start


def train_kvzap(kind, options, folder):
    command = [*shlex.split(options.kvzap), "train", kind, str(options.pairs), "-o", str(folder), "-q"]
    if kind == "mlp":
        command += ["--epochs", str(options.epochs), "--lr", str(options.lr), "--batch", str(options.batch), "--seed",
                    str(options.seed)]
        command += ["--hidden", str(options.hidden)] if options.hidden else []
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if result.returncode != 0:
        sys.exit(f"{shlex.join(command)}\n{result.stderr}")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", type=pathlib.Path, metavar="PAIRS.h5")
    parser.add_argument("test", type=pathlib.Path, metavar="TEST.h5")
    parser.add_argument("--kinds", default="linear,mlp")
    parser.add_argument("--kvzap", default=str(ROOT / "build/kvzap"), help="the program (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="threads of the peer (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=0, help="of the MLP; default: hidden size / 8")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(options.cores)
    import h5py
    import numpy
    import torch
    from kvpress.presses.kvzap_press import KVzapModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(options.cores)
    start = time.perf_counter()
    x, y = read_pairs(options.pairs, numpy, h5py)
    reading = time.perf_counter() - start
    x_test, y_test = read_pairs(options.test, numpy, h5py)
    print(f"{len(x)} pairs to train on, {len(x_test)} to judge by; {x.shape[1]} layers, hidden size {x.shape[2]}, "
          f"{y.shape[2]} KV heads; read in {reading:.1f} s")

    def quality(model):
        with torch.no_grad():
            return squared_correlation(numpy, model.eval().float()(torch.from_numpy(x_test)).numpy(), y_test)

    report = {"pairs": len(x), "test_pairs": len(x_test), "cores": options.cores, "reading_seconds": reading}
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name) / kind
            ours_seconds = train_kvzap(kind, options, folder)
            ours = quality(KVzapModel.from_pretrained(folder))
        model, peer_seconds = (train_mlp if kind == "mlp" else train_linear)(x, y, options)
        peer = quality(model)
        report[kind] = {
            "kvzap": {"seconds": ours_seconds, "r2_mean": float(ours.mean()), "r2_layer_head": ours.tolist()},
            "kvpress": {"seconds": peer_seconds, "r2_mean": float(peer.mean()), "r2_layer_head": peer.tolist()},
            "time_ratio": ours_seconds / (reading + peer_seconds),
            "time_ratio_to_fitting": ours_seconds / peer_seconds, "r2_difference": float(ours.mean() - peer.mean()),
            "least_r2_difference": float((ours - peer).min())}
        print(f"{kind:6}  R2 {ours.mean():.4f} of kvzap, {peer.mean():.4f} of kvpress; by layer and head "
              f"{(ours - peer).min():+.3f} to {(ours - peer).max():+.3f}; {ours_seconds:.1f} s, and {peer_seconds:.1f} s to "
              f"fit: {ours_seconds / peer_seconds:.2f} of that, {ours_seconds / (reading + peer_seconds):.2f} of it with "
              "reading", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
