// SQLite as this folder uses it: statements that are prepared once, bound, stepped; blobs of
// numbers. Every failure is a Status with the database's path and SQLite's own words; a full disk
// is RESOURCE_EXHAUSTED.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

struct sqlite3;
struct sqlite3_stmt;

namespace stretto::services {
// Not thread-safe. Columns and parameters count from 0.
class Sqlite {
 public:
  // One execution of a statement. Bind all parameters in order, then Step through its rows.
  class Query {
   public:
    ~Query();
    Query(const Query&) = delete;
    Query& operator=(const Query&) = delete;

    Query& Int(int64_t value);
    Query& Real(double value);
    Query& Text(absl::string_view value);
    template <class T>
    Query& Numbers(absl::Span<const T> values) {  // as little-endian bytes
      return Blob(values.data(), values.size() * sizeof(T));
    }
    // True: there is a row. False: no more.
    absl::StatusOr<bool> Step();
    // Steps to the end.
    absl::Status Run();

    bool IsNull(int column) const;
    int64_t IntAt(int column) const;
    double RealAt(int column) const;
    std::string TextAt(int column) const;
    template <class T>
    std::vector<T> NumbersAt(int column) const {
      const absl::Span<const char> bytes = BlobAt(column);
      std::vector<T> values(bytes.size() / sizeof(T));
      std::copy(bytes.begin(), bytes.begin() + static_cast<int64_t>(values.size() * sizeof(T)),
                reinterpret_cast<char*>(values.data()));
      return values;
    }

   private:
    friend class Sqlite;
    Query(Sqlite* db, sqlite3_stmt* statement, absl::Status status)
        : db_(db), statement_(statement), status_(std::move(status)) {}
    Query& Blob(const void* data, size_t size);
    absl::Span<const char> BlobAt(int column) const;
    void Check(int code);

    Sqlite* db_;
    sqlite3_stmt* statement_;
    absl::Status status_;
    int num_bound_ = 0;
  };

  static absl::StatusOr<std::unique_ptr<Sqlite>> Open(const std::string& path);
  ~Sqlite();
  Sqlite(const Sqlite&) = delete;
  Sqlite& operator=(const Sqlite&) = delete;

  // `sql` is one statement; equal texts share their preparation. One Query of a text at a time.
  Query Prepare(const std::string& sql);
  // Any number of statements without parameters.
  absl::Status Execute(const std::string& sql);
  absl::Status Begin() { return Execute("BEGIN IMMEDIATE"); }
  absl::Status Commit() { return Execute("COMMIT"); }

 private:
  Sqlite(std::string path, sqlite3* db) : path_(std::move(path)), db_(db) {}
  absl::Status Error(int code) const;

  const std::string path_;
  sqlite3* db_;
  std::map<std::string, sqlite3_stmt*> statements_;
};
}  // namespace stretto::services
