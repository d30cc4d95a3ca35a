// The names that the readers of config.json know, for listings and messages.
#pragma once

#include <string_view>
#include <vector>

namespace kvzap::model {

/// Values of rope_type.
const std::vector<std::string_view>& rope_type_names();

/// Values of quant_method.
const std::vector<std::string_view>& quantisation_methods();

}  // namespace kvzap::model
