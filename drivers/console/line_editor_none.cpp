// Stands in for line_editor.cpp in a program that is built without libedit.
#include "console/line_editor.hpp"

namespace kvzap::driver {

std::unique_ptr<LineEditor> LineEditor::open(const std::filesystem::path&) { return nullptr; }

}  // namespace kvzap::driver
