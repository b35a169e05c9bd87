# Poisson counts with random intercepts by glmmTMB: data sets (columns set, group, y) on the standard input, the
# processor's seconds of each fit on the standard output, from the call to standard errors and conditional modes.
suppressPackageStartupMessages(library(glmmTMB))
data <- read.csv(file("stdin"))
data$group <- factor(data$group)
for (rows in split(data, data$set)) {
  before <- proc.time()
  found <- glmmTMB(y ~ 1 + (1 | group), family = poisson, data = rows)
  modes <- ranef(found, condVar = TRUE)
  errors <- summary(found)
  spent <- proc.time() - before
  cat(sum(spent[c("user.self", "sys.self", "user.child", "sys.child")]), "\n")
}
