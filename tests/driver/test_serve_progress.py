"""What kvzap serve tells of a prompt: its progress while it is read, and the rows of its tokens that stayed."""
import unittest

import test_serve as serve
from harness import CASES
from test_serve import CHAT, PLAIN, PRUNED

CASE = CASES[0]
FULL = 6 * 4  # layers and KV heads of the model


def progress_of(events, choice=0):
    return [event["prompt_progress"] for event in events
            if "prompt_progress" in event and event["choices"][0]["index"] == choice]


class Progress(serve.SharedServerTest):
    FLAGS = [*PRUNED, "--max-batch-tokens", "64"]

    def check(self, reports, total, cached=0):
        for report in reports:
            self.assertEqual(set(report), {"total", "cache", "processed", "time_ms"})
            self.assertEqual((report["total"], report["cache"]), (total, cached))
        counts = [report["processed"] for report in reports]
        times = [report["time_ms"] for report in reports]
        self.assertEqual((counts, times), (sorted(counts), sorted(times)))
        self.assertLessEqual(cached, counts[0])
        self.assertEqual(counts[-1], total)

    def test_of_a_chat(self):
        asked = serve.asking(CASE["context"] + " ", CASE["question"], max_tokens=3, return_progress=True,
                             stream_options={"include_usage": True})
        for turn in range(2):
            events = self.server.stream(CHAT, asked)
            usage = events[-1]["usage"]
            self.assertEqual(events[0]["choices"][0]["delta"]["role"], "assistant")
            reports = progress_of(events)
            self.check(reports, usage["prompt_tokens"], serve.cached_tokens_of(events[-1]))
            if turn == 0:
                self.assertGreater(len(reports), usage["prompt_tokens"] // 64)
            # They come before the answer, and change nothing of it.
            texts = [bool(event["choices"] and event["choices"][0]["delta"].get("content")) for event in events]
            places = [i for i, event in enumerate(events) if "prompt_progress" in event]
            self.assertLess(max(places), texts.index(True))
        plain = self.server.stream(CHAT, {**asked, "return_progress": False})
        self.assertEqual(progress_of(plain), [])
        self.assertEqual(serve.streamed(plain)[:2], serve.streamed(events)[:2])
        self.assertNotIn("prompt_progress", self.server.post(CHAT, asked))

    def test_of_several_prompts(self):
        prompts = [200 * [5], 90 * [6]]
        events = self.server.stream(PLAIN, {"prompt": prompts, "n": 2, "max_tokens": 2, "return_progress": True})
        for number, prompt in enumerate(prompts):
            self.check(progress_of(events, 2 * number), len(prompt))
            self.assertEqual(progress_of(events, 2 * number + 1), [])

    def test_policy_for_clients(self):
        there = self.server.status()
        self.assertEqual(there["policy"], "kvzap")
        self.assertEqual(there["amounts"], ["threshold", "keep_tokens", "kv_budget"])  # ratios need a calibration
        for flags, policy, amounts in [(["--policy", "snapkv", "--evict-ratio", "0.5"], "snapkv", ["evict_ratio"]), ([], None, [])]:
            server = self.start(*flags)
            there = server.status()
            self.assertEqual((there["policy"], there["amounts"]), (policy, amounts))
            self.stop(server)

    def test_in_one_step(self):
        """A budget in dense prefill has no steps to report between the first and the last."""
        server = self.start("--policy", "snapkv", "--evict-ratio", "0.5")
        events = server.stream(CHAT, serve.asking(CASE["context"], CASE["question"], max_tokens=2, return_progress=True))
        counts = [report["processed"] for report in progress_of(events)]
        self.assertEqual(counts[0], 0)
        self.assertLessEqual(len(counts), 3)
        self.stop(server)


class Kept(serve.ServerTest):
    ASK = serve.asking(CASE["context"], CASE["question"], max_tokens=6, ignore_eos=True, kvzap={"return_kept": True})

    def kept_of(self, server, **fields):
        reply = server.post(CHAT, {**self.ASK, **fields})
        self.assertNotIn("kept", reply["kvzap"])
        return reply, reply["choices"][0]["kvzap"].get("kept")

    def check(self, reply, kept):
        prompt, new = reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]
        self.assertEqual(set(kept), {"texts", "rows", "full"})
        self.assertEqual((len(kept["texts"]), len(kept["rows"]), kept["full"]), (prompt, prompt, FULL))
        text = "".join(kept["texts"])
        self.assertIn(CASE["context"], text)
        self.assertIn(CASE["question"].strip(), text)
        self.assertTrue(all(0 <= rows <= FULL for rows in kept["rows"]))
        # The answer is not judged, and its last token has not run.
        rows = sum(kept["rows"]) + FULL * (new - 1)
        self.assertAlmostEqual(1 - rows / (FULL * (prompt + new - 1)), reply["kvzap"]["evict_ratio"], places=9)

    def test_on_any_number_of_ranks(self):
        seen = []
        for ranks in 0, 2:
            server = self.start(*PRUNED, ranks=ranks)
            reply, kept = self.kept_of(server)
            self.check(reply, kept)
            self.assertGreater(reply["kvzap"]["evict_ratio"], 0.1)
            self.assertEqual(kept["rows"][-32:], 32 * [FULL])  # the window
            again, same = self.kept_of(server)  # from the state that was kept
            self.assertGreater(serve.cached_tokens_of(again), 0)
            self.assertEqual(same, kept)
            seen.append(kept)
            self.stop(server)
        self.assertEqual(seen[1], seen[0])

    def test_of_answers_and_policies(self):
        server = self.start("--policy", "snapkv", "--evict-ratio", "0.5")
        reply, kept = self.kept_of(server)
        self.check(reply, kept)
        reply, kept = self.kept_of(server, kvzap={"return_kept": True, "policy": "none"})
        self.assertEqual(set(kept["rows"]), {FULL})
        # Positions that were renumbered do not tell tokens.
        reply, kept = self.kept_of(server, kvzap={"return_kept": True, "policy": "snapkv+rerotate", "evict_ratio": 0.5})
        self.assertIsNone(kept)
        self.assertGreater(reply["kvzap"]["evict_ratio"], 0.3)
        reply = server.post(CHAT, {**self.ASK, "n": 3})
        self.assertEqual(["kept" in one["kvzap"] for one in reply["choices"]], [True, False, False])
        events = server.stream(CHAT, self.ASK)
        last = serve.streamed(events)[2]
        self.assertEqual(last["kvzap"]["kept"], reply["choices"][0]["kvzap"]["kept"])
        reply = server.post(CHAT, {**self.ASK, "kvzap": {}})
        self.assertNotIn("kept", reply["choices"][0]["kvzap"])
        self.check_error(server.request("POST", CHAT, {**self.ASK, "kvzap": {"return_kept": 1}}), 400, "kvzap.return_kept")
        self.stop(server)


if __name__ == "__main__":
    unittest.main()
