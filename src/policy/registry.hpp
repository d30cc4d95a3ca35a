// The functions that describe each policy and modifier; registry.cpp has one line for each of them.
#pragma once

#include <kvzap/engine/policies.hpp>

namespace kvzap::policy {

// From keys, values and positions.
PolicyInfo knorm();
PolicyInfo random();
PolicyInfo streaming_llm();
PolicyInfo keydiff();
PolicyInfo lagkv();
PolicyInfo leverage();
PolicyInfo cur();
PolicyInfo compactor();
PolicyInfo qfilter();
PolicyInfo cap();
// From attention.
PolicyInfo snapkv();
PolicyInfo tova();
PolicyInfo h2o();
PolicyInfo scissorhands();
PolicyInfo r_kv();
PolicyInfo lazy_eviction();
PolicyInfo tri_attention();
PolicyInfo dropkv();
PolicyInfo pyramidkv();
PolicyInfo expected_attention();
PolicyInfo non_causal();
PolicyInfo simlayerkv();
PolicyInfo finch();
// Learned or given.
PolicyInfo kvzap();
PolicyInfo fastkvzip();
PolicyInfo trim_kv();
PolicyInfo duo_attention();
// From the model's repetition of the context.
PolicyInfo kvzip();
PolicyInfo kvzip_plus();
PolicyInfo kvcompose();

// Modifiers.
ModifierInfo ada();
ModifierInfo pyramid();
ModifierInfo global();
ModifierInfo per_layer();
ModifierInfo per_head();
ModifierInfo critical();
ModifierInfo chunk();
ModifierInfo chunkkv();
ModifierInfo dms();
ModifierInfo kvcrush();
ModifierInfo merge();
ModifierInfo cam();
ModifierInfo rerotate();
ModifierInfo fit();

}  // namespace kvzap::policy
