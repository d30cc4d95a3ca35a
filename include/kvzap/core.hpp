// All of kvzap::core. The templates over a caller's views, of any layout in any memory space:
// score.hpp, keep_list.hpp, compact.hpp and attend.hpp.
#pragma once

#include <kvzap/core/array_view.hpp>
#include <kvzap/core/attend.hpp>
#include <kvzap/core/attention.hpp>
#include <kvzap/core/attention_mass.hpp>
#include <kvzap/core/cache.hpp>
#include <kvzap/core/cache_shape.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/compact.hpp>
#include <kvzap/core/eviction.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/core/keep_list.hpp>
#include <kvzap/core/page_pool.hpp>
#include <kvzap/core/quantised_rows.hpp>
#include <kvzap/core/ragged_layer.hpp>
#include <kvzap/core/read_pages.hpp>
#include <kvzap/core/score.hpp>
#include <kvzap/core/selection.hpp>
#include <kvzap/core/threads.hpp>
#include <kvzap/core/types.hpp>
#include <kvzap/core/view_checks.hpp>
