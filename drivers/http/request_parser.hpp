// A request of HTTP/1, and its parser.
#pragma once

#include <boost/beast/http/basic_parser.hpp>
#include <cstddef>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <map>
#include <string>
#include <string_view>

namespace kvzap::driver {

/// Maximum bytes of a head.
constexpr std::size_t longest_head = std::size_t{64} << 10;

/// A request whose head has arrived.
struct Request {
  std::string method;
  std::string path;       // decoded, without the query
  std::string authority;  // name and port that the client connected to; "": it names none
  std::string host;       // the name or address in `authority`, as host_in returns it
  std::map<std::string, std::string> fields;  // by name in lower case; the last one of each name
  bool is_http11 = false;
  bool has_body = false;
  std::uint64_t length = 0;         // announced bytes of the body; 0 if it comes in chunks
  bool waits_for_continue = false;  // Expect: 100-continue
  bool keeps_open = false;          // the client wants to send further requests
  std::string client;               // its address
  std::string id;                   // see request_id; "" before the head is complete

  /// Returns the value of a field, or "". `name`: in lower case.
  const std::string& field(const std::string& name) const;
};

/// Returns the name or address in NAME, NAME:PORT, [IPV6] or [IPV6]:PORT: in lower case, without
/// the dot of the root, an IPv4 address in IPv6 as IPv4. Returns "" for another text.
std::string host_in(std::string_view authority);

/// Thrown for a request that breaks the protocol. Nothing after it can be told from its body.
class FramingError : public Error {
 public:
  FramingError(int of, const std::string& what) : Error(what), status(of) {}
  int status;
};

/// Reads one request. Boost.Beast parses; this class refuses what RFC 9112 lets a server refuse
/// and what Beast accepts, because a proxy in front could understand it differently.
class RequestParser final : private boost::beast::http::basic_parser<true> {
 public:
  RequestParser();

  /// Reads bytes until the end of the head, of the body or of `bytes`. Returns how many it has
  /// read; the caller offers the others again, with more after them. Throws FramingError.
  std::size_t read(std::string_view bytes);
  bool has_begun() const { return got_some(); }
  bool has_head() const { return is_header_done(); }
  bool is_whole() const { return is_done(); }

  Request& request() { return m_request; }
  const Request& request() const { return m_request; }
  /// Returns the bytes of the body that came since the last call.
  std::string take_body();

 private:
  using Verb = boost::beast::http::verb;
  using Field = boost::beast::http::field;
  using View = boost::beast::string_view;
  using Code = boost::beast::error_code;

  void set_authority(std::string_view authority);
  void on_request_impl(Verb, View method, View target, int version, Code&) override;
  void on_response_impl(int, View, int, Code&) override {}
  void on_field_impl(Field field, View name, View value, Code&) override;
  // New in Boost between 1.83 and 1.92, where it overrides: before, on_field_impl gets trailers,
  // too.
  void on_trailer_field_impl(Field, View, View, Code&) {}
  void on_header_impl(Code&) override;
  void on_body_init_impl(const boost::optional<std::uint64_t>&, Code&) override {}
  std::size_t on_body_impl(View bytes, Code&) override;
  void on_chunk_header_impl(std::uint64_t, View, Code&) override {}
  std::size_t on_chunk_body_impl(std::uint64_t, View bytes, Code& code) override {
    return on_body_impl(bytes, code);
  }
  void on_finish_impl(Code&) override {}

  Request m_request;
  int m_hosts = 0, m_lengths = 0, m_encodings = 0;
  bool m_is_in_trailer = false;
  std::string m_body;
};

}  // namespace kvzap::driver
