// Draws of tokens on the host.
#pragma once

#include <cstddef>
#include <kvzap/engine/token_draw.hpp>
#include <vector>

#include "engine/likely_tokens.hpp"

namespace kvzap::engine {

/// Scratch of draws, one for each thread.
struct DrawScratch {
  LikelyTokens likely;
  std::vector<double> cumulative;
};

/// Draws a token of logits that scratch.likely has read and found finite: filters apply in the
/// order temperature, top-k, top-p, min-p. Weights are summed in the order of the tokens: the
/// largest logit first, of equal ones the smaller id.
TokenId draw_token(const float* logits, std::size_t count, const TokenDraw& draw,
                   DrawScratch& scratch);

/// Reads logits and draws a token. Returns -1 if a logit is NaN or the largest is not finite.
TokenId read_and_draw(const float* logits, std::size_t count, const TokenDraw& draw);

}  // namespace kvzap::engine
