#include "server/openapi_texts.hpp"

namespace kvzap::server {

const char* const openapi_operations = R"json(
{
"/": {"get": {"operationId": "page", "summary": "The page: a chat in the browser", "type": "text/html"}},
"/health": {"get": {"operationId": "health", "summary": "Whether the server takes requests", "reply": "Health"}},
"/metrics": {"get": {"operationId": "metrics", "summary": "Metrics in Prometheus' text format", "type": "text/plain"}},
"/openapi.json": {"get": {"operationId": "openapi", "summary": "This document", "reply": "Document"}},
"/v1/models": {"get": {"operationId": "listModels", "summary": "The model, as a list", "reply": "Models"}},
"/v1/models/{name}": {"get": {"operationId": "getModel", "summary": "The model", "reply": "Model"}},
"/kvzap/status": {"get": {"operationId": "status", "summary": "Memory and sequences, for the page", "reply": "Status"}},
"/v1/chat/completions": {"post": {"operationId": "createChatCompletion", "summary": "Answer a conversation (OpenAI)",
  "request": "ChatRequest", "reply": "ChatCompletion", "event": "ChatCompletionChunk"}},
"/v1/completions": {"post": {"operationId": "createCompletion", "summary": "Continue prompts (OpenAI)",
  "request": "CompletionRequest", "reply": "Completion", "event": "Completion"}},
"/v1/responses": {"post": {"operationId": "createResponse", "summary": "Answer a conversation, of which the server may have stored a part (OpenAI)",
  "request": "ResponseRequest", "reply": "Response", "event": "ResponseEvent"}},
"/v1/responses/{name}": {
  "get": {"operationId": "getResponse", "summary": "A stored response", "reply": "Response"},
  "delete": {"operationId": "deleteResponse", "summary": "Delete a stored response", "reply": "Deleted"}},
"/v1/messages": {"post": {"operationId": "createMessage", "summary": "Answer a conversation (Anthropic)",
  "request": "MessagesRequest", "reply": "Message", "event": "MessagesEvent"}},
"/v1/messages/count_tokens": {"post": {"operationId": "countTokens", "summary": "Count the tokens of a conversation (Anthropic)",
  "request": "MessagesRequest", "reply": "TokenCount"}},
"/v1/embeddings": {"post": {"operationId": "createEmbedding", "summary": "Vectors of texts (OpenAI)",
  "request": "EmbeddingRequest", "reply": "Embeddings"}},
"/v1/score": {"post": {"operationId": "createScore", "summary": "Cosines of vectors of texts (vLLM)",
  "request": "ScoreRequest", "reply": "Scores"}},
"/v1/rerank": {"post": {"operationId": "createRanking", "summary": "Documents in the order of their cosines with a query (vLLM, Jina)",
  "request": "RerankRequest", "reply": "Ranking"}},
"/tokenize": {"post": {"operationId": "tokenize", "summary": "The tokens of a text", "request": "TokenizeRequest", "reply": "Tokens"}},
"/detokenize": {"post": {"operationId": "detokenize", "summary": "The text of tokens", "request": "DetokenizeRequest", "reply": "Text"}}
})json";

}  // namespace kvzap::server
