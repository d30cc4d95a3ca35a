#include "http/request_parser.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/beast/http/error.hpp>
#include <limits>
#include <utility>

#include "files/ascii.hpp"
#include "files/quote.hpp"
#include "http/reply.hpp"

namespace kvzap::driver {
namespace {

namespace http = boost::beast::http;

int hex_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

/// Replaces %41 by A. Leaves other uses of % as they are: such a path is unknown anyway.
std::string decoded(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const int high = text[i] == '%' && i + 2 < text.size() ? hex_of(text[i + 1]) : -1;
    const int low = high < 0 ? -1 : hex_of(text[i + 2]);
    if (low < 0) {
      result += text[i];
      continue;
    }
    result += static_cast<char>(16 * high + low);
    i += 2;
  }
  return result;
}

/// RFC 9112, 5.2: other servers may not take such a line for a part of the header above.
bool has_folded_line(std::string_view head) {
  return head.find("\n ") != std::string_view::npos || head.find("\n\t") != std::string_view::npos;
}

/// Whether the first line ends in HTTP/ and a number as 2.0.
bool names_version(std::string_view head) {
  const std::string_view line = head.substr(0, head.find_first_of("\r\n"));
  const std::size_t place = line.rfind(" HTTP/");
  return head.substr(line.size(), 2) == "\r\n" && place != std::string_view::npos &&
         line.size() == place + 9 && line[place + 7] == '.';
}

bool is_port(std::string_view text) {
  return text.size() <= 5 &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// The server decides by these. With two values a proxy in front could decide by the other one.
bool is_single(std::string_view field) {
  constexpr std::array names = {"authorization", "content-encoding", "content-type",
                                "expect",        "origin",           "x-api-key"};
  return std::find(names.begin(), names.end(), field) != names.end();
}

}  // namespace

std::string host_in(std::string_view authority) {
  using boost::asio::ip::make_address_v6;
  if (!authority.empty() && authority.front() == '[') {
    const std::size_t end = authority.find(']');
    if (end == std::string_view::npos) return {};
    const std::string_view rest = authority.substr(end + 1);
    if (!rest.empty() && (rest.front() != ':' || !is_port(rest.substr(1)))) return {};
    boost::system::error_code code;
    const auto address = make_address_v6(std::string(authority.substr(1, end - 1)), code);
    if (code) return {};
    if (!address.is_v4_mapped()) return files::lower_case(address.to_string());
    return make_address_v4(boost::asio::ip::v4_mapped, address).to_string();
  }
  const std::size_t colon = authority.find(':');
  if (colon != std::string_view::npos && !is_port(authority.substr(colon + 1))) return {};
  std::string_view name = authority.substr(0, colon);
  if (!name.empty() && name.back() == '.') name.remove_suffix(1);
  const bool is_name = std::all_of(name.begin(), name.end(), [](char c) {
    return files::is_letter_or_digit(c) ||
           std::string_view("-._~!$&'()*+;=%").find(c) != std::string_view::npos;
  });
  return is_name ? files::lower_case(name) : std::string();
}

const std::string& Request::field(const std::string& name) const {
  static const std::string none;
  const auto found = fields.find(name);
  return found == fields.end() ? none : found->second;
}

RequestParser::RequestParser() {
  header_limit(static_cast<std::uint32_t>(longest_head));
  // Who reads the body knows its limit. (Some versions of Beast refuse every body without one.)
  body_limit(std::numeric_limits<std::uint64_t>::max());
}

std::size_t RequestParser::read(std::string_view bytes) {
  std::size_t taken = 0;
  if (!has_begun()) {
    // RFC 9112, 2.2: old clients send an empty line after a body.
    while (bytes.substr(taken, 2) == "\r\n") taken += 2;
    if (bytes.substr(taken) == "\r") return taken;
  }
  const bool had_head = has_head();
  while (taken < bytes.size() && !is_whole() && has_head() == had_head) {
    Code code;
    const std::size_t begin = taken;
    taken += put(boost::asio::const_buffer(bytes.data() + taken, bytes.size() - taken), code);
    if (!had_head && has_folded_line(bytes.substr(begin, taken - begin))) {
      throw FramingError(bad_request, "invalid HTTP request: a header continues on another line");
    }
    if (code == http::error::need_more) break;
    if (code == http::error::header_limit) {
      throw FramingError(
          head_too_large,
          fmt::format("the head is too large; expected at most {} bytes", longest_head));
    }
    if (code == http::error::bad_version && names_version(bytes.substr(begin))) {
      throw FramingError(unknown_version, "unknown version of HTTP; expected HTTP/1.1 or HTTP/1.0");
    }
    if (code) throw FramingError(bad_request, "invalid HTTP request: " + code.message());
    m_is_in_trailer = has_head();
  }
  return taken;
}

std::string RequestParser::take_body() { return std::exchange(m_body, {}); }

void RequestParser::set_authority(std::string_view authority) {
  m_request.authority = authority;
  m_request.host = host_in(authority);
  if (!m_request.host.empty()) return;
  throw FramingError(
      bad_request,
      fmt::format("invalid HTTP request: the host is {}; expected a name or address, as in "
                  "localhost:8080 or [::1]:8080",
                  files::in_quotes(m_request.authority)));
}

void RequestParser::on_request_impl(Verb, View method, View target, int version, Code&) {
  m_request.method.assign(method.data(), method.size());
  m_request.is_http11 = version > 10;
  std::string_view rest(target.data(), target.size());
  // RFC 9112, 3.2.2: the name in the target takes the place of the Host header.
  const std::string scheme = files::lower_case(rest.substr(0, rest.find("://")));
  if (scheme == "http" || scheme == "https") {
    rest.remove_prefix(scheme.size() + 3);
    const std::size_t end = std::min(rest.find_first_of("/?"), rest.size());
    set_authority(rest.substr(0, end));
    rest.remove_prefix(end);
    m_request.path = "/";
  }
  const std::string_view path = rest.substr(0, rest.find('?'));
  if (!path.empty()) m_request.path = decoded(path);
}

void RequestParser::on_field_impl(Field field, View name, View text, Code&) {
  if (m_is_in_trailer) return;  // nothing here uses trailers
  const std::string value(text.data(), text.size());
  const std::string key = files::lower_case(std::string_view(name.data(), name.size()));
  if (is_single(key) && m_request.fields.count(key) > 0) {
    throw FramingError(bad_request, fmt::format("invalid HTTP request: two values of {}", key));
  }
  if (field == Field::host) {
    if (++m_hosts > 1) {
      throw FramingError(bad_request, "invalid HTTP request: two Host headers; expected one host");
    }
    if (m_request.authority.empty()) {
      set_authority(value);
    } else if (host_in(value).empty()) {
      throw FramingError(bad_request, "invalid HTTP request: the Host header names no host");
    }
  } else if (field == Field::content_length) {
    // Beast also accepts lists of equal numbers.
    if (++m_lengths > 1 || value.find(',') != std::string::npos) {
      throw FramingError(bad_request, "invalid HTTP request: two values of Content-Length");
    }
  } else if (field == Field::transfer_encoding) {
    if (++m_encodings > 1 || files::lower_case(value) != "chunked") {
      throw FramingError(not_implemented,
                         fmt::format("Transfer-Encoding is {}; expected chunked alone",
                                     m_encodings > 1 ? "given twice" : files::in_quotes(value)));
    }
    if (!m_request.is_http11) {
      throw FramingError(bad_request, "invalid HTTP request: HTTP/1.0 has no Transfer-Encoding");
    }
  } else if (field == Field::expect && m_request.is_http11) {
    m_request.waits_for_continue = files::lower_case(value) == "100-continue";
    if (!m_request.waits_for_continue) {
      throw FramingError(expectation_failed, fmt::format("Expect is {}; expected 100-continue",
                                                         files::in_quotes(value)));
    }
  }
  m_request.fields[key] = value;
}

void RequestParser::on_header_impl(Code&) {
  if (m_request.is_http11 && m_hosts == 0) {
    throw FramingError(bad_request, "invalid HTTP request: no Host header");
  }
  if (m_lengths > 0 && m_encodings > 0) {
    throw FramingError(bad_request, "invalid HTTP request: Content-Length and Transfer-Encoding");
  }
  m_request.length = content_length().value_or(0);
  m_request.has_body = m_encodings > 0 || m_request.length > 0;
  m_request.keeps_open = keep_alive();
}

std::size_t RequestParser::on_body_impl(View bytes, Code&) {
  m_body.append(bytes.data(), bytes.size());
  return bytes.size();
}

}  // namespace kvzap::driver
