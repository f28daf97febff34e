#include "services/coordinator/sqlite.h"

#include <sqlite3.h>

#include "absl/strings/str_cat.h"

namespace stretto::services {
Sqlite::Query::~Query() {
  if (statement_ == nullptr) return;
  sqlite3_reset(statement_);
  sqlite3_clear_bindings(statement_);
}

void Sqlite::Query::Check(int code) {
  if (code != SQLITE_OK && status_.ok()) status_ = db_->Error(code);
}

Sqlite::Query& Sqlite::Query::Int(int64_t value) {
  if (status_.ok()) Check(sqlite3_bind_int64(statement_, ++num_bound_, value));
  return *this;
}

Sqlite::Query& Sqlite::Query::Real(double value) {
  if (status_.ok()) Check(sqlite3_bind_double(statement_, ++num_bound_, value));
  return *this;
}

Sqlite::Query& Sqlite::Query::Text(absl::string_view value) {
  if (status_.ok()) {
    Check(sqlite3_bind_text64(statement_, ++num_bound_, value.data() == nullptr ? "" : value.data(),
                              value.size(), SQLITE_TRANSIENT, SQLITE_UTF8));
  }
  return *this;
}

Sqlite::Query& Sqlite::Query::Blob(const void* data, size_t size) {
  if (status_.ok()) {
    Check(sqlite3_bind_blob64(statement_, ++num_bound_, size == 0 ? "" : data, size,
                              SQLITE_TRANSIENT));
  }
  return *this;
}

absl::StatusOr<bool> Sqlite::Query::Step() {
  if (!status_.ok()) return status_;
  const int code = sqlite3_step(statement_);
  if (code == SQLITE_ROW) return true;
  if (code == SQLITE_DONE) return false;
  status_ = db_->Error(code);
  return status_;
}

absl::Status Sqlite::Query::Run() {
  for (;;) {
    const absl::StatusOr<bool> row = Step();
    if (!row.ok()) return row.status();
    if (!*row) return absl::OkStatus();
  }
}

bool Sqlite::Query::IsNull(int column) const {
  return sqlite3_column_type(statement_, column) == SQLITE_NULL;
}

int64_t Sqlite::Query::IntAt(int column) const { return sqlite3_column_int64(statement_, column); }
double Sqlite::Query::RealAt(int column) const { return sqlite3_column_double(statement_, column); }

std::string Sqlite::Query::TextAt(int column) const {
  const auto* text = reinterpret_cast<const char*>(sqlite3_column_text(statement_, column));
  if (text == nullptr) return "";
  return std::string(text, static_cast<size_t>(sqlite3_column_bytes(statement_, column)));
}

absl::Span<const char> Sqlite::Query::BlobAt(int column) const {
  const auto* data = static_cast<const char*>(sqlite3_column_blob(statement_, column));
  if (data == nullptr) return {};
  return {data, static_cast<size_t>(sqlite3_column_bytes(statement_, column))};
}

absl::StatusOr<std::unique_ptr<Sqlite>> Sqlite::Open(const std::string& path) {
  sqlite3* db = nullptr;
  const int code = sqlite3_open_v2(
      path.c_str(), &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, nullptr);
  std::unique_ptr<Sqlite> opened(new Sqlite(path, db));
  if (code != SQLITE_OK) return opened->Error(code);
  sqlite3_busy_timeout(db, 60000);
  return opened;
}

Sqlite::~Sqlite() {
  for (const auto& entry : statements_) sqlite3_finalize(entry.second);
  sqlite3_close(db_);
}

Sqlite::Query Sqlite::Prepare(const std::string& sql) {
  sqlite3_stmt*& statement = statements_[sql];
  absl::Status status;
  if (statement == nullptr) {
    const int code = sqlite3_prepare_v3(db_, sql.c_str(), static_cast<int>(sql.size()),
                                        SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
    if (code != SQLITE_OK) status = Error(code);
  }
  return Query(this, statement, std::move(status));
}

absl::Status Sqlite::Execute(const std::string& sql) {
  const int code = sqlite3_exec(db_, sql.c_str(), nullptr, nullptr, nullptr);
  return code == SQLITE_OK ? absl::OkStatus() : Error(code);
}

absl::Status Sqlite::Error(int code) const {
  const char* words = db_ != nullptr ? sqlite3_errmsg(db_) : sqlite3_errstr(code);
  const std::string message = absl::StrCat(path_, ": ", words);
  switch (code & 0xff) {
    case SQLITE_FULL:
      return absl::ResourceExhaustedError(absl::StrCat(
          message, ": the disk is full; make room and start again, nothing recorded is lost"));
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::DataLossError(message);
    case SQLITE_CANTOPEN:
      return absl::NotFoundError(message);
    default:
      return absl::InternalError(message);
  }
}
}  // namespace stretto::services
