// HDF5's C interface with checked return codes, closed handles and its error stack as text.
#pragma once

#include <fmt/format.h>
#include <hdf5.h>

#include <kvzap/core/types.hpp>
#include <string>
#include <utility>

namespace kvzap::io {

/// Switches off HDF5's own error output while it exists: errors are thrown instead.
class QuietHdf5 {
 public:
  QuietHdf5() {
    H5Eget_auto2(H5E_DEFAULT, &m_printer, &m_data);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  ~QuietHdf5() { H5Eset_auto2(H5E_DEFAULT, m_printer, m_data); }
  QuietHdf5(const QuietHdf5&) = delete;
  QuietHdf5& operator=(const QuietHdf5&) = delete;

 private:
  H5E_auto2_t m_printer = nullptr;
  void* m_data = nullptr;
};

/// Returns HDF5's messages about the last failed call, from the call itself down to the cause. Call
/// it before the next HDF5 call, which clears them.
inline std::string hdf5_failure(const char* call) {
  std::string text = fmt::format("{} failed", call);
  const H5E_walk2_t append = [](unsigned, const H5E_error2_t* error, void* target) -> herr_t {
    if (error->desc && *error->desc)
      *static_cast<std::string*>(target) += fmt::format(": {}", error->desc);
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, append, &text);
  H5Eclear2(H5E_DEFAULT);
  for (const char* cause : {"memory allocation failed", "unable to allocate memory"}) {
    if (text.find(cause) != std::string::npos) return fmt::format("out of memory in {}", call);
  }
  return text;
}

/// Returns the result of an HDF5 call. Throws Error that names `call` if it is negative.
template <class Code>
Code checked_hdf5(Code code, const char* call) {
  if (code < 0) throw Error(hdf5_failure(call));
  return code;
}

/// Owns one HDF5 identifier.
class Hdf5Handle {
 public:
  using Close = herr_t (*)(hid_t);

  Hdf5Handle() = default;
  /// `id` is the result of `call`. Throws Error if it is negative.
  Hdf5Handle(hid_t id, Close closer, const char* call)
      : m_id(checked_hdf5(id, call)), m_close(closer) {}
  Hdf5Handle(Hdf5Handle&& other) noexcept { swap(other); }
  Hdf5Handle& operator=(Hdf5Handle&& other) noexcept {
    Hdf5Handle(std::move(other)).swap(*this);
    return *this;
  }
  ~Hdf5Handle() {
    if (m_id >= 0) m_close(m_id);
  }
  void swap(Hdf5Handle& other) noexcept {
    std::swap(m_id, other.m_id);
    std::swap(m_close, other.m_close);
  }

  // HDF5's functions take the handle directly.
  // NOLINTNEXTLINE(google-explicit-constructor)
  operator hid_t() const { return m_id; }
  /// Closes now. Negative on failure; the handle is released in any case.
  herr_t close() { return m_close(std::exchange(m_id, hid_t{-1})); }

 private:
  hid_t m_id = -1;
  Close m_close = nullptr;
};

}  // namespace kvzap::io
