// The keywords of JSON Schemas that are read: which belong to which type, and which change nothing.
#pragma once

#include <set>
#include <string>

namespace stretto::engine {
// Titles, descriptions, examples and the like, and what OpenAPI's users add (x-…).
bool IsAnnotation(const std::string& keyword);
// Of a type, `type` itself among them.
const std::set<std::string>& KeywordsOf(const std::string& type);
// Of all types.
const std::set<std::string>& AllKeywords();
}  // namespace stretto::engine
