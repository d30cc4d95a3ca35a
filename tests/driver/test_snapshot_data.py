"""Every data set and attribute of a snapshot, read by h5py, is as docs/reference/snapshot-format.md says."""
import importlib.util
import json
import sys
import unittest

from harness import HAVE_HDF5, LINEAR, MODEL, SOURCE, TestCase, kvzap
from snapshot_bytes import crc32c

HAVE_H5PY = importlib.util.find_spec("h5py") is not None
KINDS = {"positions": ["positions", "judged"], "scores": ["positions", "scores", "judged"],
         "all": ["positions", "scores", "judged", "keys", "values"]}
DTYPES = {"f32": ("float32", "<u4"), "f16": ("float16", "<u2"), "bf16": ("float32", "<u2")}  # as h5py reads it; bits
# Attributes of a run that prunes by one.
SURROGATE = ["prefill", "surrogate", "surrogate_folder", "surrogate_hash"]


@unittest.skipUnless(HAVE_HDF5 and HAVE_H5PY, "needs HDF5 and h5py")
class Data(TestCase):
    def write(self, *arguments, text="The key of the red door is 4711. " * 12, n=4, ranks=0):
        """Runs the model, and returns the open snapshot and the report."""
        import h5py

        snapshot, prompt = self.folder / "cache.h5", self.folder / "prompt.txt"
        prompt.write_text(text)
        result = kvzap("-m", MODEL, "-f", prompt, "-n", str(n), "--window", "32", "--snapshot", snapshot, "--json", "-",
                       "-q", *arguments, ranks=ranks)
        self.assertEqual(result.code, 0, result)
        file = h5py.File(snapshot, "r")
        self.addCleanup(file.close)
        return file, json.loads(result.out)

    def bits(self, data, dtype):
        """What lies in the file, as its bytes; the whole data set is read by one call."""
        values = data[...]
        self.assertEqual(values.dtype, DTYPES[dtype][0])
        if dtype != "bf16":
            return values.view(DTYPES[dtype][1])
        bits = values.view("<u4")
        self.assertFalse((bits & 0xFFFF).any())
        bits = (bits >> 16).astype("<u2")
        if data.chunks is None and len(data):
            # bfloat16 itself, two bytes each, where HDF5 says that the data set begins.
            with open(data.file.filename, "rb") as raw:
                raw.seek(data.id.get_offset())
                self.assertEqual(raw.read(data.id.get_storage_size()), bits.tobytes())
        return bits

    def expect_attributes(self, node, types):
        """No others, and of these types."""
        import numpy

        self.assertEqual(set(node.attrs), set(types), node.name)
        for name, type_ in types.items():
            value = node.attrs[name]
            self.assertIs(type(value), str if type_ == "text" else numpy.dtype(type_).type, f"{node.name} {name}")

    def check_rows(self, group, heads, dtype, head_dim, content, compress, has_queries, groups, extra=()):
        """Of one layer, or of the context's ring rows in it. Returns offsets, positions and flags."""
        import numpy

        kinds = [*KINDS[content], *["recent_queries"] * has_queries]
        self.assertEqual(set(group), {"offsets", "crc32c", *kinds, *extra})
        self.expect_attributes(group, {"ring_first": "int64"})
        offsets = group["offsets"][...]
        self.assertEqual((offsets.dtype, offsets.shape, offsets[0]), ("int64", (heads + 1,), 0))
        self.assertTrue((numpy.diff(offsets) >= 0).all())
        rows = int(offsets[-1])
        expected = {"positions": ("int32", (rows,)), "scores": ("float32", (rows,)), "judged": ("uint8", (rows,)),
                    "keys": (DTYPES[dtype][0], (rows, head_dim)), "values": (DTYPES[dtype][0], (rows, head_dim))}
        checksums = group["crc32c"]
        self.expect_attributes(checksums, {"kinds": "text"})
        self.assertEqual(checksums.attrs["kinds"].split(), kinds)
        self.assertEqual((checksums.dtype, checksums.shape), ("uint32", (len(kinds), heads)))
        for kind, crcs in zip(kinds, checksums[...]):
            data = group[kind]
            if kind == "recent_queries":
                self.expect_attributes(data, {"first": "int64"})
                self.assertEqual((data.dtype, data.shape[0], data.shape[2]), ("float32", heads * groups, head_dim))
                values = data[...]
                parts = [values[head * groups:(head + 1) * groups] for head in range(heads)]
            else:
                self.expect_attributes(data, {})
                self.assertEqual((data.dtype, data.shape), expected[kind], kind)
                values = self.bits(data, dtype) if kind in ("keys", "values") else data[...]
                parts = [values[begin:end] for begin, end in zip(offsets, offsets[1:])]
            self.assertEqual([crc32c(part.tobytes()) for part in parts], crcs.tolist(), data.name)
            if values.size:
                filters = (True, "gzip", compress) if compress else (False, None, None)
                self.assertEqual((data.shuffle, data.compression, data.compression_opts), filters)
        positions, judged = group["positions"][...], group["judged"][...]
        self.assertTrue(numpy.isin(judged, (0, 1)).all())
        for begin, end in zip(offsets, offsets[1:]):
            self.assertTrue((numpy.diff(positions[begin:end]) > 0).all())
            # Rows that have not been judged are among the newest.
            self.assertTrue((positions[begin:end][judged[begin:end] == 0] >= group.attrs["ring_first"]).all())
        return offsets, positions, judged

    def check(self, file, content, dtype, compress=0, further=(), has_context=False, has_queries=False):
        """Everything there is, and nothing else."""
        import numpy

        attributes = dict.fromkeys(("kvzap_format_version", "compress", "sink", "n_layers", "n_kv_heads", "head_dim",
                                    "window", "page_rows", "tokens", "context_tokens"), "int64")
        attributes.update(dict.fromkeys(("kvzap_version", "model", "model_hash", "tokenizer_hash", "created", "options",
                                         "run_state", "content", "prune", "dtype", *further), "text"))
        self.expect_attributes(file, {**attributes, "threshold": "float32"})
        root = file.attrs
        self.assertEqual((root["kvzap_format_version"], root["content"], root["dtype"], root["compress"]),
                         (2, content, dtype, compress))
        self.assertEqual(root["model"], str(MODEL))
        if "surrogate_folder" in further:
            self.assertEqual(root["surrogate_folder"], str(LINEAR))
        self.assertRegex(root["created"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        for name in ("model_hash", "tokenizer_hash", "kvzap_version"):
            self.assertTrue(root[name], name)
        for name in ("options", "run_state"):
            self.assertIsInstance(json.loads(root[name]), dict)
        config = json.loads((MODEL / "config.json").read_text())
        heads, head_dim = config["num_key_value_heads"], config["head_dim"]
        layers, groups = config["num_hidden_layers"], config["num_attention_heads"] // heads
        self.assertEqual([root[n] for n in ("n_layers", "n_kv_heads", "head_dim")], [layers, heads, head_dim])
        self.assertEqual(set(file), {"token_ids", "logits", "state", "layers", *["context"] * has_context})
        ids = file["token_ids"]
        self.assertEqual((ids.dtype, ids.ndim), ("int32", 1))
        self.assertGreaterEqual(len(ids[...]), root["tokens"])
        self.assertLessEqual(ids[...].max(), config["vocab_size"] - 1)
        logits = file["logits"]
        self.assertEqual((logits.dtype, logits.shape), ("float32", (config["vocab_size"],)))
        self.assertTrue(numpy.isfinite(logits[...]).all())
        state = file["state"]
        self.assertLessEqual({"judged", "evicted", "non_finite"}, set(state.attrs))
        self.expect_attributes(state, dict.fromkeys(state.attrs, "int64"))
        self.assertEqual(set(file["layers"]), {str(n) for n in range(layers)})
        tokens = root["tokens"]
        kept = 0
        for n in range(layers):
            layer = file[f"layers/{n}"]
            offsets, positions, _ = self.check_rows(layer, heads, dtype, head_dim, content, compress, has_queries,
                                                    groups)
            kept += len(positions)
            self.assertTrue((positions < tokens).all())
            newest = numpy.arange(max(0, tokens - root["window"]), tokens)
            for begin, end in zip(offsets, offsets[1:]):
                self.assertEqual(positions[max(begin, end - len(newest)):end].tolist(), newest.tolist())
        # Those that were judged as they came; a budget that is met while the model generates evicts others.
        evicted = tokens * layers * heads - kept
        (self.assertLess if has_queries else self.assertEqual)(state.attrs["evicted"], evicted)
        if has_context:
            context = file["context"]
            self.expect_attributes(context, dict.fromkeys(("tokens", "judged", "evicted", "non_finite"), "int64"))
            self.assertEqual(context.attrs["tokens"], root["context_tokens"])
            self.assertEqual(set(context), {"layers"})
            self.assertEqual(set(context["layers"]), set(file["layers"]))
            for n in range(layers):
                layer = context[f"layers/{n}"]
                _, positions, _ = self.check_rows(layer, heads, dtype, head_dim, content, compress, False, groups,
                                                  extra=["retained"])
                retained = layer["retained"][...]
                self.assertEqual((retained.dtype, retained.shape), ("int64", (heads,)))
                of_sequence = numpy.diff(file[f"layers/{n}/offsets"][...])
                self.assertTrue((retained <= of_sequence).all())
                self.assertTrue((positions < root["context_tokens"]).all())

    KVZAP = ("--surrogate", LINEAR, "--threshold", "-3.4")

    def test_value_types(self):
        for number, dtype in enumerate(DTYPES):
            file, report = self.write(*self.KVZAP, "--dtype", "bf16" if number else "f32", "--snapshot-dtype", dtype,
                                      ranks=number)
            self.check(file, "all", dtype, further=SURROGATE)
            kept = [[int(n) for n in (file[f"layers/{i}/offsets"][1:] - file[f"layers/{i}/offsets"][:-1])]
                    for i in range(file.attrs["n_layers"])]
            self.assertEqual(kept, report["context"]["kept_rows"])
            file.close()

    def test_maps(self):
        for arguments, content, compress in ((["positions"], "positions", 6), (["scores"], "scores", 6),
                                             (["all", "--snapshot-compress", "3"], "all", 3)):
            file, _ = self.write(*self.KVZAP, "--dtype", "bf16", "--snapshot-content", *arguments)
            self.check(file, content, "bf16", compress, further=SURROGATE)
            file.close()

    def test_context_to_cut_back_to_and_newest_queries(self):
        file, _ = self.write(*self.KVZAP, "--prune", "always", "--question", "What is the key?", "--question",
                             "Which door?", "--snapshot-every", "3", n=8)
        self.check(file, "all", "bf16", further=[*SURROGATE, "sampler"], has_context=True)
        file.close()
        file, _ = self.write("--policy", "snapkv", "--evict-ratio", "0.5", "--decode-every", "4", "--decode-keep", "64",
                             "--snapshot-every", "3", n=8)
        self.check(file, "all", "bf16", further=["prefill", "policy", "budget", "sampler"], has_queries=True)


    def test_quantised_rows(self):
        """Codes and scales of all rows before the ring: the same numbers as in a file of wide rows."""
        import numpy

        sys.path.insert(0, str(SOURCE / "drivers"))
        from plot import quantised_rows
        for kv_type, ranks, compress in (("q8", 0, 0), ("q8,q4", 2, 0), ("q4", 0, 6), ("q3,q2", 0, 0)):
            with self.subTest(kv_type=kv_type):
                arguments = (*self.KVZAP, "--dtype", "f32", "--kv-type", kv_type)
                wide, _ = self.write(*arguments, "--snapshot-dtype", "f32", ranks=ranks)
                self.check(wide, "all", "f32", further=SURROGATE)
                expected = {n: {k: wide[f"layers/{n}/{k}"][...] for k in ("keys", "values")} for n in wide["layers"]}
                wide.close()
                file, _ = self.write(*arguments, "--snapshot-compress", str(compress), ranks=ranks)
                self.assertEqual((file.attrs["kvzap_format_version"], file.attrs["kv_type"]), (3, kv_type))
                heads, dim = file.attrs["n_kv_heads"], file.attrs["head_dim"]
                for n, layer in file["layers"].items():
                    offsets, ring = layer["offsets"][...], file.attrs["window"]
                    kinds = layer["crc32c"].attrs["kinds"].split()
                    self.assertEqual(kinds, [*KINDS["all"], "key_codes", "key_scales", "value_codes", "value_scales"])
                    crcs = dict(zip(kinds, layer["crc32c"][...]))
                    for name, row_type in zip(("keys", "values"), (kv_type.split(",") * 2)[:2]):
                        self.assertEqual(layer[name].shape, (heads * ring, dim))
                        codes, scales = (layer[f"{name[:-1]}_{part}"][...] for part in ("codes", "scales"))
                        self.assertEqual((codes.dtype, codes.shape), ("uint8", (offsets[-1] - heads * ring,
                                                                                quantised_rows.code_bytes(row_type, dim))))
                        self.assertEqual((scales.dtype, scales.shape), ("float32", codes.shape[:1]))
                        for head in range(heads):
                            part = slice(offsets[head] - head * ring, offsets[head + 1] - (head + 1) * ring)
                            self.assertEqual(crc32c(codes[part].tobytes()), crcs[f"{name[:-1]}_codes"][head])
                            rows = quantised_rows.unpack(codes[part], scales[part], row_type, dim)
                            newest = layer[name][head * ring:(head + 1) * ring]
                            numpy.testing.assert_allclose(numpy.concatenate([rows, newest]),
                                                          expected[n][name][offsets[head]:offsets[head + 1]],
                                                          rtol=1e-5, atol=1e-5)
                file.close()


if __name__ == "__main__":
    unittest.main()
