// Tables and views of run.sqlite. Blobs are packed little-endian: ids int32, log-probs float32,
// versions int64.
#include "services/coordinator/journal.h"

namespace stretto::services {
const char kJournalSchema[] = R"sql(
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- One row per life of the coordinator.
CREATE TABLE sessions(id INTEGER PRIMARY KEY, started TEXT NOT NULL, seconds REAL NOT NULL);

CREATE TABLE members(name TEXT PRIMARY KEY, pool TEXT NOT NULL, address TEXT NOT NULL,
  epoch INTEGER NOT NULL, state TEXT NOT NULL, peak_rss_bytes INTEGER NOT NULL DEFAULT 0,
  changed TEXT NOT NULL) WITHOUT ROWID;

-- A policy version exists when its row does. seq orders it among the other events.
CREATE TABLE versions(number INTEGER PRIMARY KEY, hash TEXT NOT NULL, created TEXT NOT NULL);

-- checksum, here and below: of a row's content (journal_checksum.h), which is compared whenever the
-- row is read.
-- Token ids of prompts, by place in the dataset; epoch 4294967295 is the evaluation set.
CREATE TABLE prompts(epoch INTEGER NOT NULL, line INTEGER NOT NULL, ids BLOB NOT NULL,
  checksum INTEGER NOT NULL, PRIMARY KEY(epoch, line)) WITHOUT ROWID;

-- kind: train (round: the step it is for) or eval (round: the version evaluated).
-- state: new, ready (has prompt ids), generated, scored, rejected (reason says why).
CREATE TABLE groups(id INTEGER PRIMARY KEY, kind TEXT NOT NULL, round INTEGER NOT NULL,
  position INTEGER NOT NULL, epoch INTEGER NOT NULL, line INTEGER NOT NULL, state TEXT NOT NULL,
  reason TEXT NOT NULL, min_version INTEGER NOT NULL, scorer_tag TEXT NOT NULL DEFAULT '',
  changed TEXT NOT NULL);
CREATE INDEX groups_by_round ON groups(kind, round);

-- One row per completion; replaced as a whole when its group is generated again.
CREATE TABLE rollouts(group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, ids BLOB NOT NULL,
  logprobs BLOB NOT NULL, versions BLOB NOT NULL, sampling_logprobs BLOB NOT NULL,
  finish_reason TEXT NOT NULL, num_tokens INTEGER NOT NULL, min_version INTEGER NOT NULL,
  checksum INTEGER NOT NULL, PRIMARY KEY(group_id, sample_index));
CREATE TABLE scores(group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, reward REAL NOT NULL,
  components TEXT NOT NULL, reference_logprobs BLOB NOT NULL, checksum INTEGER NOT NULL,
  PRIMARY KEY(group_id, sample_index));

-- What a step trains on, in order. Written before the trainer is asked.
CREATE TABLE batches(step INTEGER NOT NULL, ordinal INTEGER NOT NULL, group_id INTEGER NOT NULL UNIQUE,
  PRIMARY KEY(step, ordinal)) WITHOUT ROWID;
CREATE TABLE batch_options(step INTEGER PRIMARY KEY, kl_coef REAL NOT NULL);
CREATE TABLE steps(step INTEGER PRIMARY KEY, metrics TEXT NOT NULL, seconds REAL NOT NULL,
  skip_reason TEXT NOT NULL, next_kl_coef REAL NOT NULL, created TEXT NOT NULL);

CREATE TABLE evals(version INTEGER PRIMARY KEY, score REAL NOT NULL, num_prompts INTEGER NOT NULL,
  num_rejected INTEGER NOT NULL, created TEXT NOT NULL);
CREATE TABLE checkpoints(version INTEGER PRIMARY KEY, hash TEXT NOT NULL, path TEXT NOT NULL,
  created TEXT NOT NULL);
CREATE TABLE events(seq INTEGER PRIMARY KEY, time TEXT NOT NULL, text TEXT NOT NULL);

CREATE VIEW progress AS
  SELECT step, json_extract(metrics, '$.reward_mean') AS reward_mean,
    json_extract(metrics, '$.kl') AS kl, json_extract(metrics, '$.entropy') AS entropy,
    json_extract(metrics, '$.completion_length') AS completion_length,
    json_extract(metrics, '$.logprob_mismatch_max') AS logprob_mismatch_max, seconds, created
  FROM steps ORDER BY step;
CREATE VIEW rewards AS
  SELECT b.step, g.epoch, g.line, s.sample_index, s.reward, s.components
  FROM batches b JOIN groups g ON g.id = b.group_id JOIN scores s ON s.group_id = g.id
  ORDER BY b.step, b.ordinal, s.sample_index;
-- Complete groups that have not been trained on.
CREATE VIEW buffer AS
  SELECT g.id AS group_id, g.round AS step, g.min_version, g.changed AS since
  FROM groups g WHERE g.kind = 'train' AND g.state = 'scored'
    AND NOT EXISTS (SELECT 1 FROM batches b JOIN versions v ON v.number = b.step
                    WHERE b.group_id = g.id)
  ORDER BY g.position;
CREATE VIEW dropped_groups AS
  SELECT id AS group_id, kind, round, epoch, line, reason, changed FROM groups
  WHERE state = 'rejected' ORDER BY id;
CREATE VIEW trained_rollouts AS
  SELECT b.step, b.ordinal, g.id AS group_id, g.epoch, g.line, r.sample_index, r.num_tokens,
    r.finish_reason, r.min_version, b.step - 1 - r.min_version AS staleness, s.reward
  FROM batches b JOIN versions v ON v.number = b.step JOIN groups g ON g.id = b.group_id
    JOIN rollouts r ON r.group_id = g.id
    LEFT JOIN scores s ON s.group_id = r.group_id AND s.sample_index = r.sample_index
  ORDER BY b.step, b.ordinal, r.sample_index;
CREATE VIEW staleness AS
  SELECT step, AVG(staleness) AS mean, MAX(staleness) AS max FROM trained_rollouts GROUP BY step;
-- Has to be empty: places of the dataset that were trained on twice.
CREATE VIEW trained_twice AS
  SELECT g.epoch, g.line, COUNT(*) AS times FROM batches b JOIN groups g ON g.id = b.group_id
  GROUP BY g.epoch, g.line HAVING COUNT(*) > 1;
)sql";
}  // namespace stretto::services
