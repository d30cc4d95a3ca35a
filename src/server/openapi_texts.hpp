// The parts of the document of /openapi.json that openapi.cpp completes: JSON texts.
#pragma once

namespace kvzap::server {

/// The schemas of request bodies, by name. In them
///   - a property that is not required may also be null;
///   - "@NAME" is a limit, of which openapi.cpp has the value;
///   - "includes": [SCHEMA] adds the properties of other schemas, and "without" names those of them
///     that the endpoint does not have.
extern const char* const openapi_requests;
/// The schemas of replies, by name.
extern const char* const openapi_replies;
/// The operations, by path and method. "request", "reply" and "event" name schemas.
extern const char* const openapi_operations;

}  // namespace kvzap::server
