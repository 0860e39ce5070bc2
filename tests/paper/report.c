/* report.c - the table: a file of tab-separated values and a page, from one run. */
#include "paper.h"

#include <math.h>
#include <stdio.h>

static FILE *tsv, *page;

int paper_report_open(const char *tsv_path, const char *page_path) {
  tsv = fopen(tsv_path, "w");
  page = fopen(page_path, "w");
  if (!tsv || !page) {
    fprintf(stderr, "paper: %s cannot be written\n", tsv ? page_path : tsv_path);
    return 1;
  }
  fputs("claim\tpaper\tours\tunit\tnote\n", tsv);
  return 0;
}

void paper_text(const char *text) { fprintf(page, "\n%s\n\n", text); }

void paper_line(const char *text) { fprintf(page, "%s\n", text); }

void paper_picture(const char *name, const char *how) {
  fprintf(page, "\n![the paper's figures beside ours](img/%s.svg)\n\n%s\n\n", name, how);
}

void paper_table(void) {
  fputs("| | paper | ours | unit | expected | |\n|---|---|---|---|---|---|\n", page);
}

/* Integers from 100 on; below, as many digits as are significant. */
static const char *figure(char text[32], double value) {
  double size = fabs(value);
  if (isnan(value)) return "-";
  snprintf(text, 32, "%.*f", size >= 100 ? 0 : size >= 10 ? 1 : 2, value);
  return text;
}

void paper_add(const paper_row *row) {
  char ours[32], least[32], most[32], range[80] = "";
  const char *verdict = "";
  if (row->least != 0 || row->most != 0) {
    int inside = row->ours >= row->least && row->ours <= row->most;
    if (row->most > 1e9) {
      snprintf(range, sizeof range, "&ge; %s", figure(least, row->least));
    } else if (row->least == 0 || row->least < -1e9) {
      snprintf(range, sizeof range, "&le; %s", figure(most, row->most));
    } else {
      snprintf(range, sizeof range, "%s to %s", figure(least, row->least), figure(most, row->most));
    }
    verdict = inside ? "" : "**outside.** ";
  }
  fprintf(tsv, "%s\t%s\t%s\t%s\t%s%s\n", row->claim, row->paper, figure(ours, row->ours), row->unit,
          *verdict ? "outside what was expected. " : "", row->note);
  fprintf(page, "| %s | %s | %s | %s | %s | %s%s |\n", row->claim, row->paper,
          figure(ours, row->ours), row->unit, range, verdict, row->note);
  printf("%-58s %10s %10s %-8s\n", row->claim, row->paper, figure(ours, row->ours), row->unit);
}

int paper_report_close(void) {
  int bad = 0;
  if (tsv) bad |= ferror(tsv) | fclose(tsv);
  if (page) bad |= ferror(page) | fclose(page);
  if (bad) fprintf(stderr, "paper: the report could not be written\n");
  return bad != 0;
}
