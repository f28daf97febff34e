// Finds a key that comes twice in an object of a JSON text, while the text is parsed: readers
// disagree on which of the two counts, and what the writer meant would be lost without a word. A
// template over the parser's type (nlohmann's json or ordered_json), so that this folder needs no
// JSON library.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace stretto {
// "pointer/key", the key escaped as JSON pointers (RFC 6901) want it.
inline std::string JoinJsonPointer(const std::string& pointer, const std::string& key) {
  return absl::StrCat(pointer, "/", absl::StrReplaceAll(key, {{"~", "~0"}, {"/", "~1"}}));
}

template <class Json>
class RepeatedKey {
 public:
  // The parser's callback; what it returns keeps the value.
  bool See(typename Json::parse_event_t event, const Json& value) {
    static const std::string no_key;
    return See(event, event == Json::parse_event_t::key
                          ? value.template get_ref<const std::string&>()
                          : no_key);
  }
  // The same; `key` is that of an event that tells one.
  bool See(typename Json::parse_event_t event, const std::string& key) {
    using Event = typename Json::parse_event_t;
    if (event == Event::key) {
      Name(key);
    } else if (event == Event::object_end || event == Event::array_end) {
      open_.pop_back();
    } else {
      if (!open_.empty() && open_.back().is_array) ++open_.back().index;
      if (event == Event::object_start) open_.push_back({});
      if (event == Event::array_start) open_.push_back({.is_array = true});
    }
    return true;
  }
  bool found() const { return found_; }
  const std::string& key() const { return key_; }
  // The object with the key, as a JSON pointer: "" is the whole text, "/messages/0" within it.
  const std::string& place() const { return place_; }
  // The value that would come next, as a JSON pointer; and the first key on the way to it ("":
  // none).
  std::string NextPlace() const {
    std::string place;
    for (const Value& value : open_) {
      // Of the lists around, the item that has begun is counted already.
      place = value.is_array ? absl::StrCat(place, "/", value.index + (&value == &open_.back()))
                             : JoinJsonPointer(place, value.key);
    }
    return place;
  }
  std::string FirstKey() const {
    return open_.empty() || open_.front().is_array ? "" : open_.front().key;
  }

 private:
  struct Value {
    bool is_array = false;
    int64_t index = -1;    // of the latest item
    std::string key = {};  // the latest
    std::set<std::string> keys = {};
  };
  void Name(const std::string& key) {
    Value& object = open_.back();
    object.key = key;
    if (object.keys.insert(key).second || found_) return;
    found_ = true;
    key_ = key;
    for (size_t i = 0; i + 1 < open_.size(); ++i) {
      place_ = open_[i].is_array ? absl::StrCat(place_, "/", open_[i].index)
                                 : JoinJsonPointer(place_, open_[i].key);
    }
  }

  std::vector<Value> open_;  // the objects and arrays around
  bool found_ = false;
  std::string key_, place_;
};
}  // namespace stretto
