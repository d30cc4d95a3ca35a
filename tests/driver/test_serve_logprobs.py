"""Log probabilities of prompts: completions with `echo` and `logprobs`, as harnesses for evaluation ask for them."""
import json
import math
import unittest

from harness import CASES, LINEAR
from test_serve import CHAT, PLAIN, PRUNED, ServerTest, SharedServerTest, text_of

CASE = CASES[0]


def lists_of(reply, choice=0):
    return reply["choices"][choice]["logprobs"]


class PromptLogprobs(SharedServerTest):
    def tokens(self, text):
        return self.server.post("/tokenize", {"content": text})["tokens"]

    def ask(self, prompt, **fields):
        return self.server.post(PLAIN, {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 1,
                                        "temperature": 0, **fields})

    def check_lists(self, lists, count):
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            self.assertEqual(len(lists[name]), count, name)
        self.assertEqual((lists["token_logprobs"][0], lists["top_logprobs"][0]), (None, None))
        for logprob, top in zip(lists["token_logprobs"][1:], lists["top_logprobs"][1:]):
            self.assertLessEqual(logprob, max(top.values()) + 1e-6)
            self.assertLessEqual(sum(map(math.exp, top.values())), 1 + 1e-5)

    def test_those_of_generated_tokens(self):
        """A text has the log probabilities that it had when it was generated."""
        said = self.server.post(PLAIN, {"prompt": CASE["context"], "logprobs": 2, "max_tokens": 20, "temperature": 0,
                                        "ignore_eos": True, "kvzap": {"prune": "none"}})
        text = text_of(said)
        whole = CASE["context"] + text
        count = len(self.tokens(whole))
        reply = self.ask(whole)
        self.assertTrue(text_of(reply).startswith(whole))
        lists, old = lists_of(reply), lists_of(said)
        self.check_lists(lists, count + 1)
        self.assertEqual(lists["tokens"][-21:-1], old["tokens"])
        for new, known in zip(lists["token_logprobs"][-21:-1], old["token_logprobs"]):
            self.assertAlmostEqual(new, known, delta=1e-3)
        self.assertEqual("".join(lists["tokens"][:-1]), whole)
        self.assertEqual(lists["text_offset"][-2] + len(lists["tokens"][-2]), len(whole))
        # A beginning in the cache changes nothing, and pruning comes after the prompt.
        again = lists_of(self.ask(whole))
        self.assertEqual(again, lists)
        full = lists_of(self.ask(whole, kvzap={"prune": "none"}))
        for new, known in zip(full["token_logprobs"][1:-1], lists["token_logprobs"][1:-1]):
            self.assertAlmostEqual(new, known, delta=1e-3)

    def test_forms(self):
        text = CASE["context"][:200]
        ids = self.tokens(text)
        whole = self.ask(text)
        self.assertEqual(lists_of(self.ask(ids)), lists_of(whole))
        alone = self.ask(text, max_tokens=0)
        self.assertEqual((text_of(alone), alone["choices"][0]["finish_reason"]), (text, "length"))
        self.assertEqual(alone["usage"]["completion_tokens"], 0)
        self.check_lists(lists_of(alone), len(ids))
        self.assertEqual(lists_of(alone)["token_logprobs"], lists_of(whole)["token_logprobs"][:-1])
        self.assertEqual([top for top in lists_of(self.ask(text, logprobs=0))["top_logprobs"]],
                         [None, *len(ids) * [{}]])
        two = self.ask([text, ids[:20]], n=2, max_tokens=2)
        for choice in range(4):
            self.check_lists(lists_of(two, choice), (len(ids) if choice < 2 else 20) + 2)
        # Another number of tokens in a step: another kernel, and another order of sums.
        both = zip(lists_of(two, 1)["token_logprobs"][1:-2], lists_of(alone)["token_logprobs"][1:], strict=True)
        for one, other in both:
            self.assertAlmostEqual(one, other, places=4)
        self.assertEqual(text_of(self.server.post(PLAIN, {"prompt": text, "max_tokens": 0})), "")
        one = self.ask(ids[:1], max_tokens=0)
        self.assertEqual(lists_of(one)["token_logprobs"], [None])
        self.check_error(self.server.request("POST", CHAT, {"messages": [{"role": "user", "content": "x"}],
                                                            "max_tokens": 0}), 400, "max_tokens")

    def test_stream(self):
        text = CASE["context"][:200]
        events = self.server.stream(PLAIN, {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": 3,
                                            "temperature": 0})
        whole = self.ask(text, max_tokens=3)
        self.assertEqual("".join(one["text"] for event in events for one in event["choices"]), text_of(whole))
        for name in ("tokens", "token_logprobs", "text_offset"):
            pieces = [item for event in events for one in event["choices"] if one["logprobs"]
                      for item in one["logprobs"][name]]
            self.assertEqual(pieces, lists_of(whole)[name])

    def test_the_end_is_in_the_list(self):
        """One token for the prompt and each new one, even if the new one ends the answer."""
        asked = f"<|im_start|>user\n{CASE['context']}{CASE['question']}<|im_end|>\n<|im_start|>assistant\n"
        reply = self.ask(asked + CASE["expected"], kvzap={"prune": "none"})
        self.assertEqual((reply["choices"][0]["finish_reason"], lists_of(reply)["tokens"][-1]), ("stop", "<|im_end|>"))

    def test_policies(self):
        text = CASE["context"][:2000]
        full = lists_of(self.ask(text, kvzap={"prune": "none"}, max_tokens=1))
        for policy, takes_parts in (("snapkv", True), ("compactor", False)):
            status, _, body = self.server.request("POST", PLAIN, {
                "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1, "kvzap": {"policy": policy, "evict_ratio": 0.5}})
            self.assertEqual(status, 200 if takes_parts else 400, body)
            if not takes_parts:
                self.assertIn(b"kvzap.prune", body)
                continue
            # The prompt has them before its rows are chosen.
            found = lists_of(json.loads(body))["token_logprobs"][1:-1]
            for one, other in zip(found, full["token_logprobs"][1:]):
                self.assertAlmostEqual(one, other, places=4)


class Preempted(ServerTest):
    def test_each_token_once(self):
        """Answers outgrow the memory, and the newest prompts run again."""
        server = self.start("--surrogate", LINEAR, "--threshold=-9", "--window", "32", "--dtype", "f32",
                            "--kv-memory", "16MiB", "--max-batch-tokens", "64")
        prompt = {"prompt": [CASE["context"][i:] for i in range(6)], "echo": True, "logprobs": 1, "max_tokens": 400,
                  "ignore_eos": True, "temperature": 0}
        reply = server.post(PLAIN, prompt)
        for i, choice in enumerate(reply["choices"]):
            tokens = server.post("/tokenize", {"content": prompt["prompt"][i]})["tokens"]
            self.assertEqual(len(choice["logprobs"]["tokens"]), len(tokens) + 400)
            self.assertEqual("".join(choice["logprobs"]["tokens"][:len(tokens)]), prompt["prompt"][i])
        self.assertGreater(server.metrics()["kvzap_preemptions_total"], 0)
        self.stop(server)


if __name__ == "__main__":
    unittest.main()
