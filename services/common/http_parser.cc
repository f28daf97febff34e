#include "services/common/http_parser.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace stretto::services {
namespace {
constexpr int kMaxBlankBytes = 4;  // empty lines before a request (RFC 9112, 2.2)
constexpr size_t kMaxMethodBytes = 32;
constexpr size_t kMaxChunkLineBytes = 256;  // its size and extensions

// RFC 9110, 5.6.2.
bool IsToken(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
           absl::StrContains("!#$%&'*+-.^_`|~", c);
  });
}

bool IsDigits(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isdigit(static_cast<unsigned char>(c));
  });
}

absl::string_view WithoutBlanks(absl::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = absl::ascii_tolower(static_cast<unsigned char>(c));
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

// False where an escape isn't one, or is that of a zero byte.
bool DecodePercent(absl::string_view text, std::string* out) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out->push_back(text[i]);
      continue;
    }
    if (i + 2 >= text.size()) return false;
    const int high = HexDigit(text[i + 1]), low = HexDigit(text[i + 2]);
    if (high < 0 || low < 0 || high + low == 0) return false;
    out->push_back(static_cast<char>(high * 16 + low));
    i += 2;
  }
  return true;
}

bool HasElement(absl::string_view list, absl::string_view element) {
  for (const absl::string_view entry : absl::StrSplit(list, ',')) {
    if (absl::EqualsIgnoreCase(WithoutBlanks(entry), element)) return true;
  }
  return false;
}
}  // namespace

bool HttpParser::Refuse(int status, absl::string_view reason) {
  state_ = State::kRefused;
  refusal_status_ = status;
  refusal_ = std::string(reason);
  return false;
}

HttpRequest HttpParser::Take() {
  HttpRequest request = std::move(request_);
  *this = HttpParser(limits_);
  return request;
}

size_t HttpParser::Feed(absl::string_view data) {
  size_t used = 0;
  while (used < data.size() && (state_ == State::kHead || state_ == State::kBody)) {
    const absl::string_view rest = data.substr(used);
    switch (part_) {
      case Part::kHead:
        used += FeedHead(rest);
        break;
      case Part::kSized:
      case Part::kChunkData:
        used += FeedSized(rest);
        break;
      default:
        used += FeedLine(rest);
    }
  }
  return used;
}

size_t HttpParser::FeedHead(absl::string_view data) {
  for (size_t i = 0; i < data.size(); ++i) {
    const char c = data[i];
    const char last = head_.empty() ? '\0' : head_.back();
    if (head_.empty() && (c == '\r' || c == '\n')) {
      if (++num_blanks_ <= kMaxBlankBytes) continue;
      Refuse(400, "the request begins with empty lines");
      return i + 1;
    }
    started_ = true;
    const bool is_control = (static_cast<unsigned char>(c) < 0x20 && c != '\t') || c == 0x7F;
    if ((c == '\n') != (last == '\r') || (is_control && c != '\r' && c != '\n')) {
      Refuse(400,
             "the request's head has a control character, or a line that doesn't end with CRLF");
      return i + 1;
    }
    head_.push_back(c);
    if (head_.size() > limits_.max_head_bytes) {
      const bool in_line = !absl::StrContains(head_, "\r\n");
      Refuse(in_line ? 414 : 431, absl::StrCat("the request's ", in_line ? "path" : "headers",
                                               " and what comes before take more than ",
                                               limits_.max_head_bytes, " bytes"));
      return i + 1;
    }
    if (absl::EndsWith(head_, "\r\n\r\n")) {
      ReadHead();
      return i + 1;
    }
  }
  return data.size();
}

void HttpParser::ReadHead() {
  const std::string head = std::move(head_);
  head_.clear();
  bool is_first = true;
  for (const absl::string_view line : absl::StrSplit(absl::StripSuffix(head, "\r\n\r\n"), "\r\n")) {
    if (!(is_first ? ReadRequestLine(line) : ReadHeader(line))) return;
    is_first = false;
  }
  if (!ReadMeaning() || !ReadBodyLength()) return;
  state_ = part_ == Part::kSized && left_ == 0 ? State::kDone : State::kBody;
}

bool HttpParser::ReadRequestLine(absl::string_view line) {
  const std::vector<absl::string_view> parts = absl::StrSplit(line, ' ');
  if (parts.size() != 3 || !IsToken(parts[0]) || parts[0].size() > kMaxMethodBytes) {
    return Refuse(400, "not an HTTP request: its first line isn't 'METHOD PATH HTTP/1.1'");
  }
  const absl::string_view version = parts[2];
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    const bool is_http = version.size() == 8 && absl::StartsWith(version, "HTTP/");
    return Refuse(is_http ? 505 : 400, "only HTTP/1.1 and HTTP/1.0 are spoken here");
  }
  minor_version_ = version.back() - '0';
  request_.method = std::string(parts[0]);
  return ReadTarget(parts[1]);
}

bool HttpParser::ReadTarget(absl::string_view target) {
  constexpr char kBad[] = "the request's path is malformed";
  for (const char c : target) {
    if (c <= 0x20 || c == '#') return Refuse(400, kBad);  // bytes above 0x7F are negative
  }
  if (target == "*") {
    request_.path = "*";
    return request_.method == "OPTIONS" || Refuse(400, kBad);
  }
  // What a proxy is asked: http://host/path.
  if (absl::StartsWithIgnoreCase(target, "http://")) {
    const size_t slash = target.find('/', 7);
    target = slash == absl::string_view::npos ? "/" : target.substr(slash);
  }
  target = target.substr(0, target.find('?'));
  if (!absl::StartsWith(target, "/") || !DecodePercent(target, &request_.path)) {
    return Refuse(400, kBad);
  }
  return true;
}

bool HttpParser::ReadHeader(absl::string_view line) {
  const size_t colon = line.find(':');
  if (colon == absl::string_view::npos || !IsToken(line.substr(0, colon))) {
    return Refuse(400, "a header is malformed: expected 'NAME: VALUE' in one line");
  }
  if (request_.headers.size() == limits_.max_headers) {
    return Refuse(431, absl::StrCat("more than ", limits_.max_headers, " headers"));
  }
  request_.headers.emplace_back(absl::AsciiStrToLower(line.substr(0, colon)),
                                std::string(WithoutBlanks(line.substr(colon + 1))));
  return true;
}

bool HttpParser::ReadMeaning() {
  size_t num_hosts = 0;
  keep_alive_ = minor_version_ > 0;
  for (const auto& [name, value] : request_.headers) {
    if (name == "host") ++num_hosts;
    if (name == "connection" && HasElement(value, "keep-alive")) keep_alive_ = true;
  }
  for (const auto& [name, value] : request_.headers) {
    if (name == "connection" && HasElement(value, "close")) keep_alive_ = false;
    if (name != "expect") continue;
    if (!absl::EqualsIgnoreCase(value, "100-continue")) {
      return Refuse(417, "the header Expect: only 100-continue is known");
    }
    expects_continue_ = minor_version_ > 0;
  }
  if (num_hosts > 1 || (num_hosts == 0 && minor_version_ > 0)) {
    return Refuse(400, "expected one header Host");
  }
  return true;
}

bool HttpParser::ReadBodyLength() {
  absl::string_view length, coding;
  size_t num_lengths = 0, num_codings = 0;
  for (const auto& [name, value] : request_.headers) {
    if (name == "content-length") {
      ++num_lengths;
      length = value;
    } else if (name == "transfer-encoding") {
      ++num_codings;
      coding = value;
    }
  }
  if (num_lengths + num_codings > 1) {
    return Refuse(400, absl::StrCat("the body's length is given twice (",
                                    num_codings == 0   ? "Content-Length"
                                    : num_lengths == 0 ? "Transfer-Encoding"
                                                       : "Content-Length, Transfer-Encoding",
                                    ")"));
  }
  part_ = Part::kSized;
  if (num_codings == 1) {
    if (minor_version_ == 0) return Refuse(400, "Transfer-Encoding in HTTP/1.0");
    if (!absl::EqualsIgnoreCase(coding, "chunked")) {
      return Refuse(501, "the header Transfer-Encoding: only chunked is known");
    }
    part_ = Part::kChunkSize;
    return true;
  }
  if (num_lengths == 0) return true;
  int64_t size = 0;
  if (!IsDigits(length) || !absl::SimpleAtoi(length, &size)) {
    return Refuse(400, "the header Content-Length isn't a number of bytes");
  }
  left_ = static_cast<uint64_t>(size);
  if (left_ <= limits_.max_body_bytes) return true;
  return Refuse(413, absl::StrCat("the body has ", size, " bytes; at most ", limits_.max_body_bytes,
                                  " are taken"));
}

// The body, or a chunk of it.
size_t HttpParser::FeedSized(absl::string_view data) {
  const size_t count = static_cast<size_t>(std::min<uint64_t>(left_, data.size()));
  request_.body.append(data.data(), count);
  left_ -= count;
  if (left_ > 0) return count;
  if (part_ == Part::kSized) {
    state_ = State::kDone;
  } else {
    part_ = Part::kChunkEnd;
  }
  return count;
}

// A line of a chunked body, or a part of one.
size_t HttpParser::FeedLine(absl::string_view data) {
  const bool in_trailers = part_ == Part::kTrailers;
  for (size_t i = 0; i < data.size(); ++i) {
    const char c = data[i];
    const bool after_cr = !head_.empty() && head_.back() == '\r';
    if ((c == '\n') != after_cr || c == '\0') {
      Refuse(400, "the body's chunks are malformed: a line doesn't end with CRLF");
      return i + 1;
    }
    if (in_trailers ? ++num_trailer_bytes_ > limits_.max_head_bytes
                    : head_.size() >= kMaxChunkLineBytes) {
      Refuse(400, "the body's chunks are malformed: a line is too long");
      return i + 1;
    }
    head_.push_back(c);
    if (c != '\n') continue;
    head_.resize(head_.size() - 2);
    EndOfLine();
    head_.clear();
    return i + 1;
  }
  return data.size();
}

void HttpParser::EndOfLine() {
  if (part_ == Part::kChunkSize) return BeginChunk();
  if (part_ == Part::kTrailers) {
    if (head_.empty()) state_ = State::kDone;  // what trailers say has no meaning here
    return;
  }
  if (!head_.empty()) {
    Refuse(400, "the body's chunks are malformed: one is longer than its size says");
    return;
  }
  part_ = Part::kChunkSize;
}

void HttpParser::BeginChunk() {
  // RFC 9112, 7.1.1: blanks may stand before an extension only. Behind a size alone they are
  // passed over too, as old servers pad it; before one, readers disagree on what it says.
  absl::string_view digits = absl::string_view(head_).substr(0, head_.find(';'));
  while (!digits.empty() && (digits.back() == ' ' || digits.back() == '\t')) {
    digits.remove_suffix(1);
  }
  if (digits.empty() || digits.size() > 15) {
    Refuse(400, "the body's chunks are malformed: a size isn't a hexadecimal number");
    return;
  }
  left_ = 0;
  for (const char c : digits) {
    const int digit = HexDigit(c);
    if (digit < 0) {
      Refuse(400, "the body's chunks are malformed: a size isn't a hexadecimal number");
      return;
    }
    left_ = left_ * 16 + static_cast<uint64_t>(digit);
  }
  if (left_ > limits_.max_body_bytes - request_.body.size()) {
    Refuse(413, absl::StrCat("the body has more than the ", limits_.max_body_bytes,
                             " bytes that are taken"));
    return;
  }
  part_ = left_ == 0 ? Part::kTrailers : Part::kChunkData;
}
}  // namespace stretto::services
