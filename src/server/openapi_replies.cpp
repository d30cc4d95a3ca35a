#include "server/openapi_texts.hpp"

namespace kvzap::server {

const char* const openapi_replies = R"json(
{
"Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "object",
  "required": ["message", "type", "param", "code"], "properties": {
    "message": {"type": "string"}, "type": {"type": "string"},
    "param": {"type": ["string", "null"], "description": "The wrong field of the request."},
    "code": {"type": ["string", "null"], "description": "As model_not_found or context_length_exceeded."}}}}},
"MessagesError": {"type": "object", "required": ["type", "error"], "properties": {"type": {"const": "error"},
  "error": {"type": "object", "required": ["type", "message"], "properties": {"type": {"type": "string"}, "message": {"type": "string"}}}}},
"Health": {"type": "object", "required": ["status"], "properties": {"status": {"const": "ok"}}},
"Model": {"type": "object", "required": ["id", "object", "created", "owned_by", "max_model_len"], "properties": {
  "id": {"type": "string"}, "object": {"const": "model"}, "created": {"type": "integer"}, "owned_by": {"type": "string"},
  "max_model_len": {"type": ["integer", "null"], "description": "Tokens of the longest sequence."}}},
"Models": {"type": "object", "required": ["object", "data"], "properties": {
  "object": {"const": "list"}, "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}},
"Tokens": {"type": "object", "required": ["tokens"], "properties": {"tokens": {"type": "array", "items": {"type": "integer"}}}},
"Text": {"type": "object", "required": ["content"], "properties": {"content": {"type": "string"}}},
"TokenCount": {"type": "object", "required": ["input_tokens"], "properties": {"input_tokens": {"type": "integer"}}},
"Deleted": {"type": "object", "required": ["id", "object", "deleted"], "properties": {
  "id": {"type": "string"}, "object": {"const": "response"}, "deleted": {"const": true}}},
"Status": {"type": "object", "required": ["model", "running", "waiting", "sequences"], "properties": {
  "model": {"type": "string"}, "max_tokens": {"type": ["integer", "null"]}, "policy": {"type": ["string", "null"]},
  "amounts": {"type": "array", "items": {"type": "string"}}, "kv_memory": {"type": ["integer", "null"]},
  "kv_allocated": {"type": "integer"}, "kv_free": {"type": "integer"}, "keep_ratio": {"type": "number"},
  "running": {"type": "integer"}, "waiting": {"type": "integer"}, "prefixes": {"type": "integer"},
  "sequences": {"type": "array", "items": {"type": "object", "properties": {
    "request": {"type": "integer"}, "choice": {"type": "integer"}, "phase": {"enum": ["waiting", "prefill", "decode"]},
    "tokens": {"type": "integer"}, "new_tokens": {"type": "integer"}, "evict_ratio": {"type": "number"},
    "kv_bytes": {"type": "integer"}, "full_kv_bytes": {"type": "integer"}}}}}},
"Embeddings": {"type": "object", "required": ["object", "data", "model", "usage"], "properties": {
  "object": {"const": "list"}, "model": {"type": "string"}, "usage": {"$ref": "#/components/schemas/Usage"},
  "data": {"type": "array", "items": {"type": "object", "required": ["object", "index", "embedding"], "properties": {
    "object": {"const": "embedding"}, "index": {"type": "integer"},
    "embedding": {"description": "In base64: floats, little-endian.", "anyOf": [
      {"type": "array", "items": {"type": "number"}}, {"type": "string"}]}}}}}},
"Scores": {"type": "object", "required": ["id", "object", "created", "model", "data", "usage"], "properties": {
  "id": {"type": "string"}, "object": {"const": "list"}, "created": {"type": "integer"}, "model": {"type": "string"},
  "usage": {"$ref": "#/components/schemas/Usage"},
  "data": {"type": "array", "items": {"type": "object", "required": ["index", "object", "score"], "properties": {
    "index": {"type": "integer"}, "object": {"const": "score"}, "score": {"type": "number", "minimum": -1, "maximum": 1}}}}}},
"Ranking": {"type": "object", "required": ["id", "model", "usage", "results"], "properties": {
  "id": {"type": "string"}, "model": {"type": "string"}, "usage": {"$ref": "#/components/schemas/Usage"},
  "results": {"type": "array", "description": "The best first.", "items": {"type": "object", "required": ["index", "relevance_score"],
    "properties": {"index": {"type": "integer"}, "relevance_score": {"type": "number", "minimum": -1, "maximum": 1},
      "document": {"type": "object", "properties": {"text": {"type": "string"}}}}}}}},
"Usage": {"type": "object", "required": ["prompt_tokens", "total_tokens"], "properties": {
  "prompt_tokens": {"type": "integer"}, "completion_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"},
  "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}},
  "completion_tokens_details": {"type": "object", "properties": {
    "accepted_prediction_tokens": {"type": "integer"}, "rejected_prediction_tokens": {"type": "integer"}}}}},
"Pruned": {"type": "object", "required": ["evict_ratio", "kv_bytes", "full_kv_bytes"],
  "description": "The cache of an answer at its end, over all ranks.", "properties": {
  "evict_ratio": {"type": "number"}, "kv_bytes": {"type": "integer"},
  "full_kv_bytes": {"type": "integer", "description": "Bytes without eviction."},
  "kept": {"type": "object", "description": "With return_kept.", "properties": {
    "texts": {"type": "array", "items": {"type": "string"}}, "rows": {"type": "array", "items": {"type": "integer"}},
    "full": {"type": "integer"}}}}},
"ToolCall": {"type": "object", "required": ["id", "type", "function"], "properties": {
  "id": {"type": "string"}, "type": {"const": "function"},
  "function": {"type": "object", "required": ["name", "arguments"], "properties": {
    "name": {"type": "string"},
    "arguments": {"type": "string", "description": "The text of a JSON object, or its beginning if the answer ends in the call."}}}}},
"ToolCallPiece": {"type": "object", "required": ["index", "function"], "description": "The first piece of a call has its id, type and name.", "properties": {
  "index": {"type": "integer"}, "id": {"type": "string"}, "type": {"const": "function"},
  "function": {"type": "object", "required": ["arguments"], "properties": {
    "name": {"type": "string"}, "arguments": {"type": "string", "description": "A piece of the text."}}}}},
"TokenLogprob": {"type": "object", "required": ["token", "logprob", "bytes"], "properties": {
  "token": {"type": "string"}, "logprob": {"type": "number"}, "bytes": {"type": "array", "items": {"type": "integer"}},
  "top_logprobs": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}}}},
"ChatLogprobs": {"type": ["object", "null"], "properties": {
  "content": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}}}},
"CompletionLogprobs": {"type": ["object", "null"], "properties": {
  "tokens": {"type": "array", "items": {"type": "string"}}, "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
  "top_logprobs": {"type": "array", "items": {"type": ["object", "null"], "additionalProperties": {"type": "number"}}},
  "text_offset": {"type": "array", "items": {"type": "integer"}}}},
"FinishReason": {"enum": ["stop", "length", "tool_calls", null]},
"ChatCompletion": {"type": "object", "required": ["id", "object", "created", "model", "choices", "usage", "kvzap"], "properties": {
  "id": {"type": "string"}, "object": {"const": "chat.completion"}, "created": {"type": "integer"}, "model": {"type": "string"},
  "choices": {"type": "array", "items": {"type": "object", "required": ["index", "message", "logprobs", "finish_reason", "kvzap"], "properties": {
    "index": {"type": "integer"},
    "message": {"type": "object", "required": ["role", "content"], "properties": {
      "role": {"const": "assistant"}, "content": {"type": ["string", "null"]}, "reasoning_content": {"type": "string"},
      "tool_calls": {"type": "array", "items": {"$ref": "#/components/schemas/ToolCall"}}}},
    "logprobs": {"$ref": "#/components/schemas/ChatLogprobs"},
    "finish_reason": {"$ref": "#/components/schemas/FinishReason"}, "kvzap": {"$ref": "#/components/schemas/Pruned"}}}},
  "usage": {"$ref": "#/components/schemas/Usage"}, "kvzap": {"$ref": "#/components/schemas/Pruned"}}},
"Progress": {"type": "object", "description": "With return_progress: tokens of the prompt that have run.", "properties": {
  "total": {"type": "integer"}, "cache": {"type": "integer"}, "processed": {"type": "integer"}, "time_ms": {"type": "integer"}}},
"ChatCompletionChunk": {"type": "object", "required": ["id", "object", "created", "model", "choices"], "properties": {
  "id": {"type": "string"}, "object": {"const": "chat.completion.chunk"}, "created": {"type": "integer"}, "model": {"type": "string"},
  "choices": {"type": "array", "items": {"type": "object", "required": ["index", "delta", "finish_reason"], "properties": {
    "index": {"type": "integer"},
    "delta": {"type": "object", "properties": {
      "role": {"const": "assistant"}, "content": {"type": "string"}, "reasoning_content": {"type": "string"},
      "tool_calls": {"type": "array", "items": {"$ref": "#/components/schemas/ToolCallPiece"}}}},
    "logprobs": {"$ref": "#/components/schemas/ChatLogprobs"},
    "finish_reason": {"$ref": "#/components/schemas/FinishReason"}, "kvzap": {"$ref": "#/components/schemas/Pruned"}}}},
  "prompt_progress": {"$ref": "#/components/schemas/Progress"},
  "usage": {"$ref": "#/components/schemas/Usage"}, "kvzap": {"$ref": "#/components/schemas/Pruned"}}},
"Completion": {"type": "object", "required": ["id", "object", "created", "model", "choices"],
  "description": "A reply, or the data of an event of a stream.", "properties": {
  "id": {"type": "string"}, "object": {"const": "text_completion"}, "created": {"type": "integer"}, "model": {"type": "string"},
  "choices": {"type": "array", "items": {"type": "object", "required": ["index", "text", "logprobs", "finish_reason"], "properties": {
    "index": {"type": "integer"}, "text": {"type": "string"}, "logprobs": {"$ref": "#/components/schemas/CompletionLogprobs"},
    "finish_reason": {"$ref": "#/components/schemas/FinishReason"}, "kvzap": {"$ref": "#/components/schemas/Pruned"}}}},
  "prompt_progress": {"$ref": "#/components/schemas/Progress"},
  "usage": {"$ref": "#/components/schemas/Usage"}, "kvzap": {"$ref": "#/components/schemas/Pruned"}}},
"Response": {"type": "object", "required": ["id", "object", "created_at", "status", "error", "incomplete_details", "model", "output", "usage", "kvzap"],
  "description": "Beside these it repeats the fields of its request.", "properties": {
  "id": {"type": "string"}, "object": {"const": "response"}, "created_at": {"type": "integer"},
  "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]}, "error": {"type": ["object", "null"]},
  "incomplete_details": {"type": ["object", "null"], "properties": {"reason": {"const": "max_output_tokens"}}},
  "model": {"type": "string"},
  "output": {"type": "array", "items": {"type": "object", "required": ["id", "type", "status"], "properties": {
    "id": {"type": "string"}, "type": {"enum": ["message", "reasoning", "function_call"]}, "status": {"enum": ["in_progress", "completed", "incomplete"]},
    "role": {"const": "assistant"}, "summary": {"type": "array"}, "call_id": {"type": "string"}, "name": {"type": "string"},
    "arguments": {"type": "string"},
    "content": {"type": "array", "items": {"type": "object", "required": ["type", "text"], "properties": {
      "type": {"enum": ["output_text", "reasoning_text"]}, "text": {"type": "string"},
      "annotations": {"type": "array"}, "logprobs": {"type": "array"}}}}}}},
  "usage": {"type": ["object", "null"], "properties": {
    "input_tokens": {"type": "integer"}, "input_tokens_details": {"type": "object"}, "output_tokens": {"type": "integer"},
    "output_tokens_details": {"type": "object"}, "total_tokens": {"type": "integer"}}},
  "kvzap": {"$ref": "#/components/schemas/Pruned"}}},
"ResponseEvent": {"type": "object", "required": ["type", "sequence_number"], "description": "The data of an event, whose name is its type.",
  "properties": {"type": {"type": "string"}, "sequence_number": {"type": "integer"}, "response": {"type": "object"},
    "output_index": {"type": "integer"}, "content_index": {"type": "integer"}, "item_id": {"type": "string"}, "item": {"type": "object"},
    "part": {"type": "object"}, "delta": {"type": "string"}, "text": {"type": "string"}, "logprobs": {"type": "array"},
    "name": {"type": "string"}, "arguments": {"type": "string"}}},
"MessagesUsage": {"type": "object", "properties": {
  "input_tokens": {"type": "integer"}, "cache_creation_input_tokens": {"type": "integer"},
  "cache_read_input_tokens": {"type": "integer"}, "output_tokens": {"type": "integer"}}},
"Message": {"type": "object", "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"], "properties": {
  "id": {"type": "string"}, "type": {"const": "message"}, "role": {"const": "assistant"}, "model": {"type": "string"},
  "content": {"type": "array", "items": {"type": "object", "required": ["type"], "properties": {
    "type": {"enum": ["text", "thinking", "tool_use"]}, "text": {"type": "string"}, "thinking": {"type": "string"},
    "signature": {"type": "string"}, "id": {"type": "string"}, "name": {"type": "string"}, "input": {"type": "object"}}}},
  "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", null]}, "stop_sequence": {"type": ["string", "null"]},
  "usage": {"$ref": "#/components/schemas/MessagesUsage"}, "kvzap": {"$ref": "#/components/schemas/Pruned"}}},
"MessagesEvent": {"type": "object", "required": ["type"], "description": "The data of an event, whose name is its type.", "properties": {
  "type": {"enum": ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop", "ping", "error"]},
  "message": {"$ref": "#/components/schemas/Message"}, "index": {"type": "integer"}, "content_block": {"type": "object"},
  "delta": {"type": "object"}, "usage": {"$ref": "#/components/schemas/MessagesUsage"}, "kvzap": {"$ref": "#/components/schemas/Pruned"},
  "error": {"type": "object"}}}
})json";

}  // namespace kvzap::server
