{{- define "longshore.name" -}}
{{- $name := .Values.nameOverride | default "longshore" }}
{{- $full := contains $name .Release.Name | ternary (printf "%s-operator" .Release.Name) (printf "%s-%s-operator" .Release.Name $name) }}
{{- .Values.fullnameOverride | default $full -}}
{{- end }}

{{- define "longshore.account" -}}
{{- if eq (toString (.Values.serviceAccount).create) "false" }}{{ (.Values.serviceAccount).name | default "default" }}
{{- else }}{{ (.Values.serviceAccount).name | default (include "longshore.name" .) }}{{ end -}}
{{- end }}

{{- /* `check`, the alerts and the PodMonitor select by these, so that no value changes them. */ -}}
{{- define "longshore.selector" -}}
app.kubernetes.io/name: longshore-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "longshore.labels" -}}
{{ include "longshore.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: longshore
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Labels and annotations of an object's metadata. Give the chart's context, or a dict of it as root, labels that replace
the chart's, further labels that do not, and annotations. */ -}}
{{- define "longshore.about" -}}
{{- $root := .root | default . -}}
labels: {{- merge dict (.labels | default dict) (include "longshore.labels" $root | fromYaml) (.further | default dict) ($root.Values.commonLabels | default dict) | toYaml | nindent 2 }}
{{- with merge dict (.annotations | default dict) ($root.Values.commonAnnotations | default dict) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "longshore.image" -}}
{{- include "longshore.reference" (merge dict .Values.image (dict "tag" .Chart.AppVersion)) -}}
{{- end }}

{{- /* The value agent.image is a text, or has the fields of image. */ -}}
{{- define "longshore.agentImage" -}}
{{- $image := .Values.agent.image }}
{{- if kindIs "map" $image }}{{ include "longshore.reference" (merge dict $image (dict "repository" "longshore-agent" "tag" .Chart.AppVersion)) }}{{ else }}{{ $image }}{{ end -}}
{{- end }}

{{- define "longshore.reference" -}}
{{- with .registry }}{{ . }}/{{ end }}{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end -}}
{{- end }}

{{- /* Not empty if the CRD exists and belongs to another release or to none. Helm would refuse to install over it. */ -}}
{{- define "longshore.foreignDefinition" -}}
{{- with lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "disaggdeployments.longshore.dev" }}
{{- $owner := .metadata.annotations | default dict }}
{{- if or (ne (get $owner "meta.helm.sh/release-name") $.Release.Name) (ne (get $owner "meta.helm.sh/release-namespace") $.Release.Namespace) }}true{{ end }}
{{- end }}
{{- end }}

{{- /* What all pods of the chart have. OpenShift gives the user. */ -}}
{{- define "longshore.pod" -}}
enableServiceLinks: false
{{- $usual := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- if not (.Values.openshift).enabled }}{{ $usual = merge $usual (dict "runAsUser" 10001 "runAsGroup" 10001) }}{{ end }}
{{- range $name, $value := .Values.securityContext }}{{ $_ := set $usual $name $value }}{{ end }}
securityContext: {{- toYaml $usual | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* What all containers of the chart have. */ -}}
{{- define "longshore.container" -}}
image: {{ include "longshore.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
resources: {{- toYaml .Values.resources | nindent 2 }}
{{- $usual := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) }}
{{- range $name, $value := .Values.containerSecurityContext }}{{ $_ := set $usual $name $value }}{{ end }}
securityContext: {{- toYaml $usual | nindent 2 }}
{{- end }}

{{- define "longshore.rules" -}}
- apiGroups: [longshore.dev]
  resources: [disaggdeployments]
  verbs: [get, list, watch]
- apiGroups: [longshore.dev]
  resources: [disaggdeployments/status]
  verbs: [get, patch]
# Owner references of children with blockOwnerDeletion need this right.
- apiGroups: [longshore.dev]
  resources: [disaggdeployments/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [daemonsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# Keys are created and never read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [create, get, list, update]
# Leases of other releases, which may serve the same deployments.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get]
{{- end }}

{{- define "longshore.injected" -}}
objectSelector: {matchExpressions: [{key: longshore.dev/inject, operator: Exists}]}
resourceRules:
- {apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}
{{- end }}

{{- define "longshore.injecting" -}}
namespaceSelector:
  matchLabels:
    longshore.dev/inject: enabled
    {{- if eq .Values.mode "namespaced" }}
    kubernetes.io/metadata.name: {{ .Release.Namespace }}
    {{- end }}
{{- end }}
