#include "server/openapi_texts.hpp"

namespace kvzap::server {

const char* const openapi_requests = R"json(
{
"AnswerFields": {"type": "object", "properties": {
  "model": {"type": "string", "enum": ["@model"], "description": "The server's model. Another name has status 404."},
  "max_tokens": {"description": "Maximum number of new tokens; -1: all that fit.",
    "anyOf": [{"type": "integer", "minimum": "@max_tokens.least", "maximum": "@max_tokens.most"}, {"const": -1}]},
  "max_completion_tokens": {"description": "Wins over max_tokens.",
    "anyOf": [{"type": "integer", "minimum": "@max_tokens.least", "maximum": "@max_tokens.most"}, {"const": -1}]},
  "stream": {"type": "boolean", "default": false, "description": "Send the answer as server-sent events."},
  "stream_options": {"type": "object", "properties": {
    "include_usage": {"type": "boolean", "description": "A last event has the usage."}}},
  "n": {"type": "integer", "minimum": 1, "maximum": "@choices", "description": "Answers to each prompt."},
  "best_of": {"type": "integer", "minimum": "@best_of.least", "maximum": "@best_of.most", "description": "The value of n, if any."},
  "temperature": {"type": "number", "minimum": "@temperature.least", "maximum": "@temperature.most", "description": "0: the likeliest token."},
  "top_p": {"type": "number", "minimum": "@share.least", "maximum": "@share.most"},
  "top_k": {"type": "integer", "minimum": "@top_k.least", "maximum": "@top_k.most", "description": "0 and -1: all tokens."},
  "min_p": {"type": "number", "minimum": "@share.least", "maximum": "@share.most"},
  "presence_penalty": {"type": "number", "minimum": "@penalty.least", "maximum": "@penalty.most"},
  "frequency_penalty": {"type": "number", "minimum": "@penalty.least", "maximum": "@penalty.most"},
  "repetition_penalty": {"type": "number", "minimum": "@repetition_penalty.least", "maximum": "@repetition_penalty.most"},
  "seed": {"type": "integer", "minimum": "@seed.least", "maximum": "@seed.most", "description": "-1: a random one."},
  "stop": {"description": "Texts that end an answer, of up to 1,024 bytes. The answer excludes them.", "anyOf": [
    {"type": "string", "minLength": 1, "maxLength": "@stop_bytes"},
    {"type": "array", "maxItems": "@stops", "items": {"type": "string", "minLength": 1, "maxLength": "@stop_bytes"}}]},
  "stop_token_ids": {"type": "array", "maxItems": "@token_rules", "items": {"$ref": "#/components/schemas/TokenId"}},
  "min_tokens": {"type": "integer", "minimum": "@min_tokens.least", "maximum": "@min_tokens.most",
    "description": "Before an answer has so many tokens, no token ends it."},
  "ignore_eos": {"type": "boolean", "default": false, "description": "Continue after a token that ends an answer."},
  "logit_bias": {"type": "object", "maxProperties": "@token_rules", "description": "Token ids and what is added to their logits.",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
    "additionalProperties": {"type": "number", "minimum": "@bias.least", "maximum": "@bias.most"}},
  "return_progress": {"type": "boolean", "default": false, "description": "In a stream: events with the progress of the prompt."},
  "kvzap": {"$ref": "#/components/schemas/PruningFields"},
  "response_format": {"type": "object", "required": ["type"], "description": "The form of the answer.", "properties": {
    "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
    "schema": {"$ref": "#/components/schemas/JsonSchema"},
    "json_schema": {"type": "object", "required": ["schema"], "properties": {
      "schema": {"$ref": "#/components/schemas/JsonSchema"},
      "strict": {"type": "boolean", "description": "Objects have no keys that the schema does not name."}}}}},
  "structured_outputs": {"type": "object", "additionalProperties": false, "description": "At most one of its members.", "properties": {
    "json": {"$ref": "#/components/schemas/JsonSchema"},
    "json_object": {"type": "boolean"},
    "regex": {"type": "string"},
    "choice": {"$ref": "#/components/schemas/Choices"},
    "grammar": {"type": "string"}}},
  "guided_json": {"$ref": "#/components/schemas/JsonSchema"},
  "json_schema": {"$ref": "#/components/schemas/JsonSchema"},
  "guided_regex": {"type": "string", "description": "A regular expression (ECMA-262) that matches the whole answer."},
  "guided_choice": {"$ref": "#/components/schemas/Choices"},
  "guided_grammar": {"type": "string", "description": "A grammar in llama.cpp's GBNF."},
  "grammar": {"type": "string", "description": "As guided_grammar."}}},
"ChatRequest": {"type": "object", "includes": ["AnswerFields"], "required": ["messages"], "properties": {
  "messages": {"type": "array", "minItems": 1, "maxItems": "@messages", "items": {"$ref": "#/components/schemas/ChatMessage"},
    "description": "A conversation. It ends with a message of the user, a result of a tool, or the beginning of an answer."},
  "logprobs": {"type": "boolean", "default": false},
  "top_logprobs": {"type": "integer", "minimum": "@logprobs.least", "maximum": "@logprobs.most", "description": "Needs logprobs."},
  "tools": {"type": "array", "maxItems": "@tools", "items": {"type": "object", "required": ["function"], "properties": {
    "type": {"type": "string", "enum": ["function"]}, "function": {"$ref": "#/components/schemas/Function"}}}},
  "tool_choice": {"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, {"type": "object", "required": ["function"],
    "properties": {"function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}}}]},
  "parallel_tool_calls": {"type": "boolean", "default": true, "description": "False: the reply has the first call alone."},
  "chat_template_kwargs": {"type": "object", "properties": {
    "enable_thinking": {"type": "boolean", "description": "Whether the model thinks, if its template has such a switch."}}}}},
"ChatMessage": {"type": "object", "required": ["role"], "properties": {
  "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
  "content": {"$ref": "#/components/schemas/Texts", "description": "Messages of the assistant with tool_calls may omit it."},
  "name": {"type": "string"},
  "tool_call_id": {"type": "string"},
  "reasoning_content": {"type": "string"},
  "tool_calls": {"type": "array", "maxItems": "@calls", "items": {"type": "object", "required": ["function"], "properties": {
    "type": {"type": "string", "enum": ["function"]},
    "function": {"type": "object", "required": ["name"], "properties": {"name": {"$ref": "#/components/schemas/FunctionName"},
      "arguments": {"type": ["string", "object"], "description": "A JSON object, or its text."}}}}}}}},
"CompletionRequest": {"type": "object", "includes": ["AnswerFields"], "required": ["prompt"], "properties": {
  "prompt": {"anyOf": [{"type": "string"}, {"$ref": "#/components/schemas/TokenIds"},
    {"type": "array", "minItems": 1, "maxItems": "@prompts",
     "items": {"anyOf": [{"type": "string"}, {"$ref": "#/components/schemas/TokenIds"}]}}]},
  "max_tokens": {"description": "Maximum number of new tokens (default: 16); -1: all that fit; 0: the prompt runs alone.",
    "anyOf": [{"type": "integer", "minimum": 0, "maximum": "@max_tokens.most"}, {"const": -1}]},
  "max_completion_tokens": {"description": "Wins over max_tokens.",
    "anyOf": [{"type": "integer", "minimum": 0, "maximum": "@max_tokens.most"}, {"const": -1}]},
  "logprobs": {"type": "integer", "minimum": "@logprobs.least", "maximum": "@logprobs.most",
    "description": "Number of likeliest tokens whose log probabilities are reported."},
  "echo": {"type": "boolean", "default": false, "description": "The text begins with the prompt."},
  "tool_choice": {"type": "string", "enum": ["none", "auto"], "description": "Completions call no tools."}}},
"MessagesRequest": {"type": "object", "includes": ["ChatRequest"], "without": "messages", "required": ["messages"], "properties": {
  "messages": {"type": "array", "minItems": 1, "maxItems": "@messages", "items": {"type": "object", "required": ["role", "content"],
    "properties": {"role": {"type": "string", "enum": ["user", "assistant"]},
      "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/components/schemas/ContentBlock"}}]}}}},
  "system": {"$ref": "#/components/schemas/Texts"},
  "stop_sequences": {"type": "array", "maxItems": "@stops", "items": {"type": "string", "minLength": 1, "maxLength": "@stop_bytes"}},
  "tools": {"type": "array", "maxItems": "@tools", "items": {"type": "object", "required": ["name", "input_schema"], "properties": {
    "type": {"type": "string", "enum": ["custom"]}, "name": {"$ref": "#/components/schemas/FunctionName"},
    "description": {"type": "string"}, "strict": {"type": "boolean"}, "input_schema": {"type": "object"}}}},
  "tool_choice": {"type": "object", "required": ["type"], "properties": {
    "type": {"type": "string", "enum": ["auto", "none", "any", "tool"]}, "name": {"type": "string"},
    "disable_parallel_tool_use": {"type": "boolean"}}},
  "thinking": {"type": "object", "required": ["type"], "properties": {
    "type": {"type": "string", "enum": ["enabled", "disabled", "adaptive"]}}},
  "output_config": {"type": "object", "properties": {"format": {"$ref": "#/components/schemas/OutputFormat"}}},
  "output_format": {"$ref": "#/components/schemas/OutputFormat"},
  "mcp_servers": {"enum": [[], {}], "description": "Not supported."},
  "container": {"enum": [[], {}], "description": "Not supported."},
  "context_management": {"enum": [[], {}], "description": "Not supported."}}},
"OutputFormat": {"type": "object", "required": ["type", "schema"], "properties": {
  "type": {"type": "string", "enum": ["json_schema"]}, "schema": {"$ref": "#/components/schemas/JsonSchema"}}},
"ContentBlock": {"type": "object", "required": ["type"], "description": "The user's: text, tool_result. The assistant's: text, thinking, tool_use.",
  "properties": {
  "type": {"type": "string", "enum": ["text", "thinking", "tool_use", "tool_result"]},
  "text": {"type": "string"}, "thinking": {"type": "string"},
  "id": {"type": "string"}, "name": {"$ref": "#/components/schemas/FunctionName"}, "input": {"type": "object"},
  "tool_use_id": {"type": "string"}, "content": {"$ref": "#/components/schemas/Texts"}}},
"ResponseRequest": {"type": "object", "includes": ["ChatRequest"], "without": "responses", "required": ["input"], "properties": {
  "input": {"anyOf": [{"type": "string"},
    {"type": "array", "maxItems": "@messages", "items": {"$ref": "#/components/schemas/InputItem"}}]},
  "instructions": {"type": "string", "description": "A system message for this request alone."},
  "previous_response_id": {"type": "string", "description": "A stored response, whose conversation goes on."},
  "store": {"type": "boolean", "default": true, "description": "Whether the response is stored."},
  "max_output_tokens": {"anyOf": [{"type": "integer", "minimum": "@max_tokens.least", "maximum": "@max_tokens.most"}, {"const": -1}]},
  "tools": {"type": "array", "maxItems": "@tools", "items": {"type": "object", "required": ["type", "name"], "properties": {
    "type": {"type": "string", "enum": ["function"]}, "name": {"$ref": "#/components/schemas/FunctionName"},
    "description": {"type": "string"}, "parameters": {"type": "object"}, "strict": {"type": "boolean"}}}},
  "tool_choice": {"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, {"type": "object", "required": ["type", "name"],
    "properties": {"type": {"type": "string", "enum": ["function"]}, "name": {"type": "string"}}}]},
  "text": {"type": "object", "properties": {"format": {"type": "object", "required": ["type"], "properties": {
    "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
    "schema": {"$ref": "#/components/schemas/JsonSchema"}, "strict": {"type": "boolean"}}}}},
  "reasoning": {"type": "object", "properties": {"effort": {"type": "string", "description": "none: the model does not think."}}},
  "metadata": {"type": "object", "description": "Is repeated in the reply."},
  "include": {"type": "array", "items": {"type": "string", "not": {"const": "message.output_text.logprobs"}}},
  "background": {"enum": [false, [], {}], "description": "Not supported."},
  "truncation": {"enum": ["disabled", [], {}], "description": "Not supported."},
  "conversation": {"enum": [[], {}], "description": "Not supported."},
  "prompt": {"enum": [[], {}], "description": "Not supported."},
  "context_management": {"enum": [[], {}], "description": "Not supported."}}},
"InputItem": {"type": "object", "properties": {
  "type": {"type": "string", "enum": ["message", "function_call", "function_call_output", "reasoning"], "default": "message"},
  "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
  "content": {"$ref": "#/components/schemas/InputTexts"},
  "call_id": {"type": "string"}, "name": {"$ref": "#/components/schemas/FunctionName"}, "arguments": {"type": "string"},
  "output": {"$ref": "#/components/schemas/InputTexts"}}},
"InputTexts": {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": "@parts", "items": {
  "type": "object", "required": ["type", "text"], "properties": {
    "type": {"type": "string", "enum": ["input_text", "output_text", "reasoning_text", "text"]}, "text": {"type": "string"}}}}]},
"Texts": {"description": "A text, or parts that are texts.", "anyOf": [{"type": "string"}, {"type": "array", "maxItems": "@parts",
  "items": {"type": "object", "required": ["type", "text"], "properties": {
    "type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}}}}]},
"TokenId": {"type": "integer", "minimum": 0, "maximum": "@last_token"},
"TokenIds": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/TokenId"}},
"Function": {"type": "object", "required": ["name"], "properties": {
  "name": {"$ref": "#/components/schemas/FunctionName"}, "description": {"type": "string"},
  "parameters": {"type": "object", "description": "A JSON schema of the arguments."},
  "strict": {"type": "boolean", "description": "Arguments have no keys that the schema does not name."}}},
"FunctionName": {"type": "string", "minLength": 1, "maxLength": "@tool_name", "pattern": "^[A-Za-z0-9_.-]+$"},
"JsonSchema": {"type": ["object", "boolean", "string"], "description": "A JSON schema, or its text."},
"Choices": {"type": "array", "minItems": 1, "maxItems": "@guided_choices", "items": {"type": "string"}, "description": "The answer is one of them."},
"PruningFields": {"type": "object", "additionalProperties": false,
  "description": "How the prompt is pruned; at most one of threshold, evict_ratio, keep_tokens and kv_budget.", "properties": {
  "policy": {"type": "string", "description": "NAME[:key=value,...][+MODIFIER...]; none: the full cache."},
  "threshold": {"type": "number"}, "evict_ratio": {"type": "number"},
  "keep_tokens": {"type": "integer", "minimum": "@keep_tokens.least", "maximum": "@keep_tokens.most"},
  "kv_budget": {"description": "Bytes, or a text such as 512M.", "anyOf": [
    {"type": "integer", "minimum": "@keep_tokens.least", "maximum": "@keep_tokens.most"}, {"type": "string"}]},
  "prune": {"type": "string", "enum": ["none", "prefill", "always"]},
  "decode_every": {"description": "Cut the cache after this many tokens that follow the prompt.",
    "type": "integer", "minimum": "@keep_tokens.least", "maximum": "@keep_tokens.most"},
  "decode_keep": {"description": "Rows of each head that such a cut leaves.",
    "type": "integer", "minimum": "@keep_tokens.least", "maximum": "@keep_tokens.most"},
  "decode_evict_ratio": {"description": "Share of all tokens so far that such a cut evicts.", "type": "number"},
  "kv_type": {"type": "string", "description": "Type of keys and values that have left the window."},
  "return_kept": {"type": "boolean", "description": "The reply says which rows of the prompt stayed."}}},
"EmbeddingFields": {"type": "object", "properties": {
  "model": {"type": "string", "enum": ["@model"], "description": "The server's model. Another name has status 404."}}},
"Inputs": {"description": "A text or token ids, or an array of these.", "anyOf": [
  {"type": "string", "minLength": 1}, {"$ref": "#/components/schemas/TokenIds"},
  {"type": "array", "minItems": 1, "maxItems": "@inputs",
   "items": {"anyOf": [{"type": "string", "minLength": 1}, {"$ref": "#/components/schemas/TokenIds"}]}}]},
"EmbeddingRequest": {"type": "object", "includes": ["EmbeddingFields"], "required": ["input"], "properties": {
  "input": {"$ref": "#/components/schemas/Inputs"},
  "encoding_format": {"type": "string", "enum": ["float", "base64"], "default": "float"}}},
"ScoreRequest": {"type": "object", "includes": ["EmbeddingFields"], "required": ["text_1", "text_2"], "properties": {
  "text_1": {"$ref": "#/components/schemas/Inputs", "description": "One, or as many as text_2 has."},
  "text_2": {"$ref": "#/components/schemas/Inputs"}}},
"RerankRequest": {"type": "object", "includes": ["EmbeddingFields"], "required": ["query", "documents"], "properties": {
  "query": {"type": "string", "minLength": 1},
  "documents": {"type": "array", "minItems": 1, "maxItems": "@inputs", "items": {"type": "string", "minLength": 1}},
  "top_n": {"type": "integer", "minimum": "@top_n.least", "maximum": "@top_n.most", "description": "Most results; 0: all."},
  "return_documents": {"type": "boolean", "default": true}}},
"TokenizeRequest": {"type": "object", "required": ["content"], "properties": {
  "model": {"type": "string", "enum": ["@model"]}, "content": {"type": "string"},
  "add_special": {"type": "boolean", "default": false}}},
"DetokenizeRequest": {"type": "object", "required": ["tokens"], "properties": {
  "model": {"type": "string", "enum": ["@model"]},
  "tokens": {"type": "array", "items": {"$ref": "#/components/schemas/TokenId"}}}}
})json";

}  // namespace kvzap::server
