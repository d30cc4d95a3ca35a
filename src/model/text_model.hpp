// The part of a model of texts and images that reads text.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/weight_store.hpp"

namespace kvzap::model {

/// Returns the class in `architectures`; "" unless it is a list of one text.
std::string class_in(const nlohmann::json& config);

/// Returns the object that describes the text model of a model of texts and images; null if config
/// has none. `field`: its name. Throws Error for a value that is no object.
const nlohmann::json* text_config_in(const nlohmann::json& config, const std::string& file,
                                     std::string& field);

/// Returns config.json's content or, for a class of texts and images whose text model is of a known
/// family, the description of a model of that family, with the fields beside it that hold for it.
/// Adds a warning then. Throws Error as text_config_in does.
nlohmann::json description_of_text(const nlohmann::json& config, const std::string& file,
                                   std::vector<std::string>& warnings);

/// Returns the store under the names of a model of texts, whatever precedes them in it.
std::unique_ptr<WeightStore> text_of(std::unique_ptr<WeightStore> store);

}  // namespace kvzap::model
