# What scripts/resume-chaos and scripts/chaos share; sourced by them, in the repository's root.

now() { date +%s.%N; }
minus() { awk -v a="$1" -v b="$2" 'BEGIN {printf "%.3f", a - b}'; }
# A random number of milliseconds below $1, as seconds. RANDOM is seeded by the caller.
random_seconds() { awk -v r="$RANDOM" -v m="$1" 'BEGIN {printf "%.3f", r / 32768 * m / 1000}'; }

# "median 0.9 s, p99 1.4 s, largest 1.4 s (20)" of the numbers in file $1, one a line.
quantiles() {
  sort -n "$1" | awk '
    {x[NR] = $1}
    function at(q,  i) {i = int(q * NR); if (i < q * NR) ++i; if (i < 1) i = 1; return x[i]}
    END {
      if (NR == 0) {print "none measured"; exit}
      printf "median %.2f s, p99 %.2f s, largest %.2f s (%d)\n", at(0.5), at(0.99), x[NR], NR}'
}

# Seconds since 1970 of a line of a service's log ("2026-01-31T12:00:00.123Z I name] …").
time_of_line() { date -ud "${1%% *}" +%s.%N; }

hash_of() { sed -n 's/.*"checkpoint_hash": "\([^"]*\)".*/\1/p' "$1/summary.json"; }

# Checks the journal of the run in folder $1; prints what is wrong.
check_journal() {
  local out
  out=$(sqlite3 -readonly "$1/run.sqlite" <tests/integration/exactly_once.sql) || return 1
  if [ "$(tail -n 1 <<<"$out")" != "violations|0" ]; then
    echo "$1/run.sqlite:" >&2
    grep -v '|0$' <<<"$out" >&2
    return 1
  fi
  echo "journal of $1: $(sed -n 's/^rollouts trained on|//p' <<<"$out") rollouts trained on, none lost or used twice, none too old"
}
