"""kvzap serve as its operators see it: metrics, names of requests, the log, origins, files of contrib/."""
import json
import os
import re
import time
import unittest

import test_serve as serve
from harness import KVZAP, MODEL, PATIENCE, SOURCE, run_command

CONTRIB = SOURCE / "contrib"

# Names of vLLM's that its dashboards ask for.
VLLM = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:prefix_cache_hits_total",
}
PROCESS = {
    "process_cpu_seconds_total", "process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds",
    "process_max_fds", "process_start_time_seconds",
}
LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*)\})? (\S+)')


def samples_of(text):
    """{name: [(labels, value)]}."""
    samples = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, labels, value = LINE.fullmatch(line).groups()
        samples.setdefault(name, []).append((dict(re.findall(r'([a-z_]+)="([^"]*)"', labels or "")), float(value)))
    return samples


def logged(server, wanted):
    """The first line of the log that matches."""
    end = time.monotonic() + PATIENCE
    while True:
        for line in list(server.lines):
            if re.search(wanted, line):
                return line
        assert time.monotonic() < end, (wanted, server.log())
        time.sleep(0.01)


class Metrics(serve.SharedServerTest):
    FLAGS = [*serve.PRUNED, "--served-model-name", 'a "model"']

    def text(self):
        status, headers, body = self.server.request("GET", "/metrics")
        self.assertEqual((status, headers["Content-Type"]), (200, "text/plain; version=0.0.4; charset=utf-8"))
        return body.decode()

    def test_histograms(self):
        self.server.post(serve.CHAT, {**serve.ASK, "n": 2, "max_tokens": 5, "ignore_eos": True})
        samples = samples_of(self.text())
        counts = {"queue": 1, "time_to_first_token": 2, "inter_token_latency": 8, "e2e_request_latency": 2}
        for name, count in counts.items():
            name = f"kvzap_{name}_seconds"
            buckets = [value for _, value in samples[f"{name}_bucket"]]
            self.assertEqual(buckets, sorted(buckets))
            self.assertEqual(samples[f"{name}_bucket"][-1][0]["le"], "+Inf")
            self.assertEqual(buckets[-1], samples[f"{name}_count"][0][1])
            self.assertGreaterEqual(buckets[-1], count)
            self.assertGreaterEqual(samples[f"{name}_sum"][0][1], 0)
        self.assertGreater(samples["kvzap_e2e_request_latency_seconds_sum"][0][1], 0)
        reasons = {labels["finished_reason"]: value for labels, value in samples["vllm:request_success_total"]}
        self.assertEqual(set(reasons), {"stop", "length"})
        self.assertGreaterEqual(reasons["length"], 2)

    def test_names(self):
        samples = samples_of(self.text())
        self.assertLessEqual(VLLM | PROCESS, set(samples))
        (build,) = samples["kvzap_build_info"]
        version = run_command([KVZAP, "--version"]).text.split()[1]
        self.assertEqual((build[0]["version"], build[1]), (version, 1))
        usage = samples["vllm:kv_cache_usage_perc"][0][1]
        self.assertTrue(0 <= usage <= 1, usage)
        resident = samples["process_resident_memory_bytes"][0][1]
        self.assertTrue(1 << 20 < resident < 1 << 36, resident)
        self.assertLess(abs(samples["process_start_time_seconds"][0][1] - time.time()), 24 * 3600)
        self.assertGreater(samples["process_open_fds"][0][1], 3)
        # The guide names all of kvzap's own.
        guide = (SOURCE / "docs/guide/serve.md").read_text()
        for name in samples:
            name = re.sub(r"_(bucket|sum|count)$", "", name)
            if name.startswith("kvzap_"):
                self.assertIn(name, guide)

    def test_parser_of_prometheus(self):
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ImportError:
            raise unittest.SkipTest("needs prometheus_client")
        self.server.post(serve.CHAT, {**serve.ASK, "max_tokens": 3})
        families = {family.name: family for family in text_string_to_metric_families(self.text())}
        self.assertEqual(families["kvzap_time_to_first_token_seconds"].type, "histogram")
        self.assertEqual(families["kvzap_steps"].type, "counter")
        self.assertEqual(families["process_cpu_seconds"].type, "counter")
        labels = families["vllm:num_requests_running"].samples[0].labels
        self.assertEqual(labels, {"model_name": 'a "model"'})


class RequestIds(serve.SharedServerTest):
    def test_of_the_client(self):
        for name in ("a", "trace-17:part/2", "x" * 128):
            status, headers, _ = self.server.request("POST", serve.CHAT, {**serve.ASK, "max_tokens": 1},
                                                     {"X-Request-Id": name})
            self.assertEqual((status, headers["X-Request-Id"]), (200, name))
            logged(self.server, rf" {re.escape(name)} POST /v1/chat/completions 200 request")

    def test_of_the_server(self):
        names = set()
        for given in (None, "", "two words", "x" * 129, 'quote"', "back\\slash", "caf\u00e9"):
            headers = {} if given is None else {"X-Request-Id": given}
            for method, path in (("GET", "/health"), ("GET", "/none"), ("POST", serve.PLAIN)):
                _, found, _ = self.server.request(method, path, {} if method == "POST" else None, headers)
                self.assertRegex(found["X-Request-Id"], r"^[0-9a-f]{32}$")
                names.add(found["X-Request-Id"])
        self.assertEqual(len(names), 21)

    def test_in_a_stream(self):
        connection = self.server.connect()
        connection.request("POST", serve.CHAT, json.dumps({**serve.ASK, "stream": True, "max_tokens": 2}),
                           {"Content-Type": "application/json", "X-Request-Id": "streamed"})
        response = connection.getresponse()
        self.assertEqual(response.headers["X-Request-Id"], "streamed")
        response.read()
        connection.close()


class Log(serve.ServerTest):
    def test_json(self):
        server = self.start(*serve.PRUNED, "--log-format", "json")
        server.request("POST", serve.CHAT, {**serve.ASK, "max_tokens": 3}, {"X-Request-Id": "one"})
        server.request("GET", "/none", headers={"X-Request-Id": "two"})
        server.request("POST", serve.CHAT, {**serve.ASK, "temperature": -1}, {"X-Request-Id": "three"})
        one, two, three = (json.loads(logged(server, rf'"request_id":"{name}"')) for name in ("one", "two", "three"))
        self.assertRegex(one.pop("time"), r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        seconds = one.pop("first_seconds"), one.pop("total_seconds")
        self.assertLessEqual(*seconds)
        self.assertGreater(one.pop("evict_ratio"), 0)
        self.assertGreater(one.pop("prompt_tokens"), 100)
        self.assertEqual(one, {"client": "127.0.0.1", "request_id": "one", "method": "POST", "path": serve.CHAT,
                               "status": 200, "request": 1, "cached_tokens": 0, "new_tokens": 3})
        self.assertEqual((two["status"], two["path"]), (404, "/none"))
        self.assertIn("unknown path", two["message"])
        self.assertEqual((three["status"], three["message"]), (400, "temperature"))
        self.stop(server)

    def test_prompts_in_json(self):
        server = self.start(*serve.PRUNED, "--log-format", "json", "--log-prompts")
        body = {"prompt": "two\nlines", "max_tokens": 1}
        server.request("POST", serve.PLAIN, body, {"X-Request-Id": "shown"})
        line = json.loads(logged(server, '"prompt":'))
        self.assertEqual((line["request_id"], json.loads(line["prompt"])), ("shown", body))
        self.stop(server)


class Origins(serve.ServerTest):
    def test_one(self):
        server = self.start(*serve.PRUNED, "--allowed-origin", "https://chat.example.org,http://localhost:3000")
        for origin, status in (("https://chat.example.org", 200), ("https://Chat.Example.org", 200),
                               ("http://localhost:3000", 200), ("http://chat.example.org", 403),
                               ("https://chat.example.org.evil.com", 403), ("null", 403)):
            found, headers, _ = server.request("GET", "/v1/models", headers={"Origin": origin})
            self.assertEqual(found, status, origin)
            self.assertEqual(headers["Access-Control-Allow-Origin"], origin if status == 200 else None)
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST",
                     "Access-Control-Request-Headers": "authorization,content-type"}
            found, headers, body = server.request("OPTIONS", serve.CHAT, headers=asked)
            self.assertEqual(found, status)
            if status == 200:
                self.assertEqual(body, b"")
                self.assertIn("POST", headers["Access-Control-Allow-Methods"])
                self.assertIn("Authorization", headers["Access-Control-Allow-Headers"])
                self.assertEqual(headers["Vary"], "Origin")
        # Not from a page, and not asking.
        self.assertIsNone(server.request("GET", "/v1/models")[1]["Access-Control-Allow-Origin"])
        self.assertEqual(server.request("OPTIONS", serve.CHAT)[0], 405)
        stream = {**serve.ASK, "stream": True, "max_tokens": 1}
        _, headers, _ = server.request("POST", serve.CHAT, stream, {"Origin": "http://localhost:3000"})
        self.assertEqual(headers["Access-Control-Allow-Origin"], "http://localhost:3000")
        self.stop(server)

    def test_all_but_with_a_key(self):
        keys = self.folder / "keys"
        keys.write_text("secret\n")
        keys.chmod(0o600)
        server = self.start(*serve.PRUNED, "--allowed-origin", "*", "--api-key-file", keys)
        origin = {"Origin": "https://any.where"}
        self.assertEqual(server.request("OPTIONS", serve.CHAT, headers=origin)[0], 200)
        status, headers, _ = server.request("GET", "/v1/models", headers=origin)
        self.assertEqual((status, headers["Access-Control-Allow-Origin"]), (401, "https://any.where"))
        self.assertEqual(server.request("GET", "/v1/models", headers={**origin, "Authorization": "Bearer secret"})[0], 200)
        self.assertNotIn("warning: --allowed-origin", server.log())
        self.stop(server)
        server = self.start(*serve.PRUNED, "--allowed-origin", "*")
        self.assertIn("kvzap: warning: --allowed-origin *", server.log())
        self.stop(server)

    def test_wrong(self):
        for value in ("chat.example.org", "https://chat.example.org/path", "https://", "://a", "http://a b"):
            result = run_command([KVZAP, "serve", "-m", MODEL, "--port", "0", "--allowed-origin", value])
            self.fail_with(result, "--allowed-origin has")


class Environment(serve.ServerTest):
    def tearDown(self):
        os.environ.pop("KVZAP_API_KEY", None)

    def test_key(self):
        keys = self.folder / "keys"
        keys.write_text("of-the-file\n")
        keys.chmod(0o600)
        os.environ["KVZAP_API_KEY"] = "of-the-environment"
        for flags, others in (([], 401), (["--api-key-file", keys], 200)):
            server = self.start(*serve.PRUNED, *flags)
            for key, status in (("of-the-environment", 200), ("of-the-file", others), ("wrong", 401)):
                found = server.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
                self.assertEqual(found[0], status)
            self.assertNotIn("of-the-environment", server.log())
            self.stop(server)

    def test_wrong_key(self):
        os.environ["KVZAP_API_KEY"] = "two words"
        result = run_command([KVZAP, "serve", "-m", MODEL, "--port", "0"])
        self.fail_with(result, "KVZAP_API_KEY has a blank")
        os.environ["KVZAP_API_KEY"] = ""
        server = self.start(*serve.PRUNED)
        self.assertEqual(server.request("GET", "/v1/models")[0], 200)
        self.stop(server)

    def test_flags_of_others(self):
        for flags, part in ((["--api-key", "x"], "KVZAP_API_KEY"), (["--cors"], "--allowed-origin"),
                            (["--gpu-memory-utilization", "0.9"], "--kv-memory"),
                            (["--max-concurrent-requests", "8"], "--max-queue")):
            self.fail_with(run_command([KVZAP, "serve", "-m", MODEL, "--port", "0", *flags]), part)
        server = self.start(*serve.PRUNED, "-np", "3", "--max-model-len", "2048", "-ngl", "99", "--served-model-name", "it")
        (model,) = server.get("/v1/models")["data"]
        self.assertEqual((model["id"], model["max_model_len"]), ("it", 2048))
        self.stop(server)


class Contrib(serve.SharedServerTest):
    """The files of contrib/ name metrics, flags and paths of this server."""

    def metrics(self):
        return samples_of(self.server.request("GET", "/metrics")[2].decode())

    def test_dashboard(self):
        board = json.loads((CONTRIB / "grafana/kvzap-serve.json").read_text())
        samples = self.metrics()
        ids, places = set(), set()
        for panel in board["panels"]:
            self.assertTrue(panel["title"] and panel["targets"])
            ids.add(panel["id"])
            places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))
            for target in panel["targets"]:
                names = re.findall(r"\b((?:kvzap|process|vllm)[_:][a-z0-9_:]+)", target["expr"])
                self.assertTrue(names, target)
                for name in names:
                    self.assertIn(name, samples)
                self.assertEqual(target["expr"].count("("), target["expr"].count(")"))
        self.assertEqual(len(ids), len(board["panels"]))
        self.assertEqual(len(places), len(board["panels"]))
        for variable in board["templating"]["list"]:
            for name in re.findall(r"kvzap_[a-z_]+", variable.get("query", "")):
                self.assertIn(name, samples)

    def test_kubernetes(self):
        try:
            import yaml
        except ImportError:
            raise unittest.SkipTest("needs PyYAML")
        documents = {one["kind"]: one for one in yaml.safe_load_all((CONTRIB / "kubernetes/kvzap-serve.yaml").read_text())}
        self.assertEqual(set(documents), {"Secret", "Deployment", "Service"})
        pod = documents["Deployment"]["spec"]["template"]
        spec = pod["spec"]
        (container,) = spec["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        flags = dict(argument.lstrip("-").split("=", 1) for argument in container["args"])
        # The server takes these flags: it fails for the files alone.
        known = run_command([KVZAP, "serve", *container["args"]])
        self.fail_with(known, mounts["models"] + "/", "no such file")
        help_text = run_command([KVZAP, "serve", "--help"]).text
        for flag in flags:
            self.assertIn(f"--{flag}", help_text)
        gibibytes = {kind: int(amounts["memory"].removesuffix("Gi")) for kind, amounts in container["resources"].items()}
        self.assertEqual(gibibytes["requests"], gibibytes["limits"])
        weights, budget = 16, int(flags["kv-memory"].removesuffix("GiB"))
        self.assertGreaterEqual(gibibytes["requests"], weights + budget + 2)
        self.assertEqual(container["resources"]["requests"]["cpu"], flags["threads"])
        self.assertGreater(spec["terminationGracePeriodSeconds"], int(flags["drain-seconds"]))
        for probe in ("startupProbe", "readinessProbe"):
            path = container[probe]["httpGet"]["path"]
            self.assertEqual(self.server.get(path), {"status": "ok"})
        (port,) = container["ports"]
        self.assertEqual(str(port["containerPort"]), flags["port"])
        self.assertEqual(documents["Service"]["spec"]["ports"][0]["targetPort"], port["name"])
        self.assertEqual(documents["Service"]["spec"]["selector"], pod["metadata"]["labels"])
        self.assertEqual(documents["Deployment"]["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"])
        annotations = pod["metadata"]["annotations"]
        self.assertEqual(annotations["prometheus.io/port"], flags["port"])
        self.assertEqual(self.server.request("GET", annotations["prometheus.io/path"])[0], 200)
        self.assertEqual(set(mounts), {volume["name"] for volume in spec["volumes"]})
        keys = documents["Secret"]["stringData"]
        self.assertEqual([f"{mounts['keys']}/{name}" for name in keys], [flags["api-key-file"]])
        self.assertTrue(flags["model"].startswith(mounts["models"] + "/"))
