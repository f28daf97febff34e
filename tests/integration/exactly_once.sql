-- Checks a run's journal from outside: sqlite3 -readonly RUN_DIR/run.sqlite < tests/integration/exactly_once.sql
-- Reads tables alone (none of the product's views). Prints a line for each check, "name|violations",
-- and at last "violations|their sum", which must be 0. While a run goes on, the step under way may be
-- incomplete; everything else must hold at any moment.
.bail on
CREATE TEMP TABLE facts AS SELECT
  (SELECT COALESCE(MAX(number), -1) FROM versions) AS newest,
  (SELECT CAST(substr(value, instr(value, 'max_staleness: ') + 15) AS INTEGER) FROM meta
   WHERE key = 'essence') AS max_staleness,
  (SELECT CAST(substr(value, instr(value, 'prompts_per_step: ') + 18) AS INTEGER) FROM meta
   WHERE key = 'essence') AS prompts_per_step,
  (SELECT CAST(substr(value, instr(value, 'group_size: ') + 12) AS INTEGER) FROM meta
   WHERE key = 'essence') AS group_size;
-- Steps whose result exists, and what they were trained on.
CREATE TEMP TABLE trained AS
  SELECT b.step, b.ordinal, g.* FROM main.batches b JOIN main.groups g ON g.id = b.group_id, facts
  WHERE b.step <= newest;
-- The versions of every trained token, decoded here (little-endian; two bytes are enough for what is
-- compared, a version beyond 65535 is a violation of its own below).
CREATE TEMP TABLE token_versions AS
  WITH RECURSIVE tokens(step, group_id, sample_index, i, n, blob) AS (
    SELECT t.step, r.group_id, r.sample_index, 0, r.num_tokens, r.versions
    FROM trained t JOIN main.rollouts r ON r.group_id = t.id WHERE r.num_tokens > 0
    UNION ALL
    SELECT step, group_id, sample_index, i + 1, n, blob FROM tokens WHERE i + 1 < n)
  SELECT step, group_id, sample_index, i,
    (instr('123456789ABCDEF', substr(hex(substr(blob, 8 * i + 1, 1)), 1, 1)) * 16 +
     instr('123456789ABCDEF', substr(hex(substr(blob, 8 * i + 1, 1)), 2, 1)) +
     instr('123456789ABCDEF', substr(hex(substr(blob, 8 * i + 2, 1)), 1, 1)) * 4096 +
     instr('123456789ABCDEF', substr(hex(substr(blob, 8 * i + 2, 1)), 2, 1)) * 256) AS version,
    hex(substr(blob, 8 * i + 3, 6)) AS high
  FROM tokens;

CREATE TEMP TABLE found(ordinal INTEGER PRIMARY KEY, name TEXT, violations INTEGER);
INSERT INTO found(name, violations)
-- Used twice.
SELECT 'place of the dataset trained on twice', COUNT(*) FROM
  (SELECT 1 FROM trained GROUP BY epoch, line HAVING COUNT(*) > 1)
UNION ALL SELECT 'position of the stream trained on twice', COUNT(*) FROM
  (SELECT 1 FROM trained GROUP BY position HAVING COUNT(*) > 1)
UNION ALL SELECT 'group in two batches', COUNT(*) FROM
  (SELECT 1 FROM main.batches GROUP BY group_id HAVING COUNT(*) > 1)
UNION ALL SELECT 'position of the stream given to two groups', COUNT(*) FROM
  (SELECT 1 FROM main.groups WHERE kind = 'train' GROUP BY position HAVING COUNT(*) > 1)
-- Lost.
UNION ALL SELECT 'position of the stream without a group',
  (SELECT COALESCE(MAX(position), -1) + 1 - COUNT(DISTINCT position) FROM main.groups
   WHERE kind = 'train')
UNION ALL SELECT 'group of a step that was taken, neither trained on nor rejected', COUNT(*)
  FROM main.groups g, facts WHERE g.kind = 'train' AND g.round <= newest AND g.state <> 'rejected'
  AND NOT EXISTS (SELECT 1 FROM trained t WHERE t.id = g.id)
UNION ALL SELECT 'rejected group without a reason', COUNT(*) FROM main.groups
  WHERE state = 'rejected' AND reason = ''
UNION ALL SELECT 'step with another number of groups than prompts_per_step', COUNT(*) FROM
  (SELECT v.number FROM main.versions v, facts LEFT JOIN trained t ON t.step = v.number
   WHERE v.number > 0 GROUP BY v.number HAVING COUNT(t.id) <> MAX(prompts_per_step))
UNION ALL SELECT 'trained group with another number of rollouts than group_size', COUNT(*) FROM
  (SELECT t.id FROM facts, trained t LEFT JOIN main.rollouts r ON r.group_id = t.id GROUP BY t.id
   HAVING COUNT(r.sample_index) <> MAX(group_size) OR MIN(r.sample_index) <> 0
     OR MAX(r.sample_index) <> MAX(group_size) - 1)
UNION ALL SELECT 'trained rollout without a score', COUNT(*) FROM trained t
  JOIN main.rollouts r ON r.group_id = t.id
  LEFT JOIN main.scores s ON s.group_id = r.group_id AND s.sample_index = r.sample_index
  WHERE s.reward IS NULL
-- Of another step, or not what it was.
UNION ALL SELECT 'trained group that is not scored, or of another step, or of the evaluation',
  COUNT(*) FROM trained WHERE state <> 'scored' OR round <> step OR kind <> 'train'
UNION ALL SELECT 'batch out of the order of the stream', COUNT(*) FROM trained a JOIN trained b
  ON b.step = a.step AND b.ordinal = a.ordinal + 1 WHERE b.position <= a.position
UNION ALL SELECT 'trained rollout whose parts have other lengths', COUNT(*) FROM trained t
  JOIN main.rollouts r ON r.group_id = t.id
  WHERE r.num_tokens < 1 OR length(r.ids) <> 4 * r.num_tokens
    OR length(r.logprobs) <> 4 * r.num_tokens OR length(r.versions) <> 8 * r.num_tokens
-- Staleness. A step begins at the version before it.
UNION ALL SELECT 'token older than max_staleness allows', COUNT(*) FROM token_versions, facts
  WHERE step - 1 - version > max_staleness
UNION ALL SELECT 'token of a version that did not exist yet', COUNT(*) FROM token_versions
  WHERE version > step - 1 OR high <> '000000000000'
UNION ALL SELECT 'rollout whose recorded oldest version is not that of its tokens', COUNT(*) FROM
  (SELECT r.min_version, MIN(v.version) AS oldest FROM token_versions v JOIN main.rollouts r
   ON r.group_id = v.group_id AND r.sample_index = v.sample_index
   GROUP BY v.group_id, v.sample_index HAVING r.min_version <> oldest)
-- Versions.
UNION ALL SELECT 'hole in the versions', newest + 1 - (SELECT COUNT(*) FROM main.versions) FROM facts
UNION ALL SELECT 'version without a hash', COUNT(*) FROM main.versions WHERE hash = '' OR number < 0
UNION ALL SELECT 'version without its step', COUNT(*) FROM
  (SELECT number FROM main.versions WHERE number > 0 EXCEPT SELECT step FROM main.steps)
UNION ALL SELECT 'step without its version', COUNT(*) FROM
  (SELECT step FROM main.steps EXCEPT SELECT number FROM main.versions)
UNION ALL SELECT 'batch beyond the next step', COUNT(DISTINCT step) FROM main.batches, facts
  WHERE step > newest + 1
UNION ALL SELECT 'checkpoint of a version that does not exist', COUNT(*) FROM main.checkpoints c
  WHERE NOT EXISTS (SELECT 1 FROM main.versions v WHERE v.number = c.version);
SELECT name, violations FROM found ORDER BY ordinal;
SELECT 'rollouts trained on', COUNT(*) FROM trained t JOIN main.rollouts r ON r.group_id = t.id;
SELECT 'violations', SUM(violations) FROM found;
