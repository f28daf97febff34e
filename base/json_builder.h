// Builds a value of nlohmann's JSON (json or ordered_json) from its parser's events, and lets a
// class of its own see them. The parser's own way for that, a callback, walks over the whole list
// at the end of every object in it: its time grows with the square of their number. A template, so
// that this folder needs no JSON library.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace stretto {
template <class Json>
class JsonBuilder {
 public:
  using Event = typename Json::parse_event_t;
  virtual ~JsonBuilder() = default;

  Json& value() { return value_; }
  // Why there is none: what the parser says; empty: all is well.
  const std::string& error() const { return error_; }
  // The number that is larger than what a floating-point one of 64 bits can be; empty: none.
  const std::string& overflowing_number() const { return overflowing_number_; }

  // What the parser calls.
  bool null() { return Add(Json()); }
  bool boolean(bool value) { return Add(Json(value)); }
  bool number_integer(typename Json::number_integer_t value) { return Add(Json(value)); }
  bool number_unsigned(typename Json::number_unsigned_t value) { return Add(Json(value)); }
  bool number_float(typename Json::number_float_t value, const std::string& /*text*/) {
    return Add(Json(value));
  }
  bool string(std::string& value) { return Add(Json(std::move(value))); }
  bool binary(typename Json::binary_t& /*value*/) { return false; }  // no text has one
  bool start_object(size_t /*size*/) { return Open(Event::object_start, Json::object()); }
  bool key(std::string& key) {
    if (See(Event::key, key)) key_ = std::move(key);
    return true;
  }
  bool end_object() { return Close(Event::object_end); }
  bool start_array(size_t /*size*/) { return Open(Event::array_start, Json::array()); }
  bool end_array() { return Close(Event::array_end); }
  bool parse_error(size_t /*position*/, const std::string& token,
                   const typename Json::exception& e) {
    constexpr int kNumberOverflow = 406;
    error_ = e.what();
    if (e.id == kNumberOverflow) overflowing_number_ = token;
    return false;
  }

 private:
  // `key` is that of Event::key. False leaves out what the event tells: then also the end of what
  // begins with it, and the other way round.
  virtual bool See(Event event, const std::string& key) = 0;

  bool Add(Json value) {
    if (See(Event::value, "")) Put(std::move(value));
    return true;
  }
  bool Open(Event event, Json value) {
    if (See(event, "")) open_.push_back(Put(std::move(value)));
    return true;
  }
  bool Close(Event event) {
    if (See(event, "")) open_.pop_back();
    return true;
  }
  Json* Put(Json value) {
    if (open_.empty()) {
      value_ = std::move(value);
      return &value_;
    }
    Json& around = *open_.back();
    if (around.is_array()) {
      around.push_back(std::move(value));
      return &around.back();
    }
    Json& place = around[key_];
    place = std::move(value);
    return &place;
  }

  Json value_;
  std::vector<Json*> open_;  // the objects and arrays around
  std::string key_, error_, overflowing_number_;
};
}  // namespace stretto
